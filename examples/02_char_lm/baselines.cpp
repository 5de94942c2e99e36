#include "baselines.h"

#include <cmath>
#include <vector>

namespace char_lm {

using cairn::data::TextDataset;

double unigram_loss(const TextDataset& train, const TextDataset& test) {
  const auto symbols = static_cast<std::size_t>(train.vocabulary().size());
  std::vector<double> counts(symbols, 1.0);
  for (const auto token : train.tokens()) counts[static_cast<std::size_t>(token)] += 1.0;
  const double total = static_cast<double>(train.tokens().size() + symbols);
  double loss = 0;
  for (const auto token : test.tokens().subspan(1)) {
    loss -= std::log(counts[static_cast<std::size_t>(token)] / total);
  }
  return loss / static_cast<double>(test.tokens().size() - 1);
}

double bigram_loss(const TextDataset& train, const TextDataset& test) {
  const auto symbols = static_cast<std::size_t>(train.vocabulary().size());
  std::vector<double> counts(symbols * symbols, 1.0);
  std::vector<double> totals(symbols, static_cast<double>(symbols));
  const auto before = train.tokens();
  for (std::size_t i = 1; i < before.size(); ++i) {
    const auto previous = static_cast<std::size_t>(before[i - 1]);
    counts[previous * symbols + static_cast<std::size_t>(before[i])] += 1.0;
    totals[previous] += 1.0;
  }
  const auto text = test.tokens();
  double loss = 0;
  for (std::size_t i = 1; i < text.size(); ++i) {
    const auto previous = static_cast<std::size_t>(text[i - 1]);
    loss -=
        std::log(counts[previous * symbols + static_cast<std::size_t>(text[i])] / totals[previous]);
  }
  return loss / static_cast<double>(text.size() - 1);
}

}  // namespace char_lm
