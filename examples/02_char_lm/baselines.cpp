#include "baselines.h"

#include <cmath>
#include <vector>

namespace char_lm {

using cairn::data::TextDataset;

double unigram_loss(const TextDataset& train, const TextDataset& test) {
  const auto symbols = static_cast<std::size_t>(train.vocabulary().size());
  std::vector<double> counts(symbols, 1.0);
  for (std::int64_t i = 0; i < train.token_count(); ++i)
    counts[static_cast<std::size_t>(train.tokens()[i])] += 1.0;
  const double total = static_cast<double>(train.token_count()) + static_cast<double>(symbols);
  double loss = 0;
  for (std::int64_t i = 1; i < test.token_count(); ++i)
    loss -= std::log(counts[static_cast<std::size_t>(test.tokens()[i])] / total);
  return loss / static_cast<double>(test.token_count() - 1);
}

double bigram_loss(const TextDataset& train, const TextDataset& test) {
  const auto symbols = static_cast<std::size_t>(train.vocabulary().size());
  std::vector<double> counts(symbols * symbols, 1.0), totals(symbols, static_cast<double>(symbols));
  const auto pair = [symbols](const std::int32_t* at) {
    return static_cast<std::size_t>(at[-1]) * symbols + static_cast<std::size_t>(at[0]);
  };
  for (std::int64_t i = 1; i < train.token_count(); ++i) {
    counts[pair(train.tokens() + i)] += 1.0;
    totals[static_cast<std::size_t>(train.tokens()[i - 1])] += 1.0;
  }
  double loss = 0;
  for (std::int64_t i = 1; i < test.token_count(); ++i) {
    loss -= std::log(counts[pair(test.tokens() + i)] /
                     totals[static_cast<std::size_t>(test.tokens()[i - 1])]);
  }
  return loss / static_cast<double>(test.token_count() - 1);
}

}  // namespace char_lm
