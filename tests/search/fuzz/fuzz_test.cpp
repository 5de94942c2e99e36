// A short run of the fuzzers' targets: the corpus, and mutations of it that a seed decides.
// scripts/fuzz runs libFuzzer over the same targets for as long as is asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "targets.h"

namespace cairn::fuzz {
namespace {

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string operator()(std::string bytes, const std::string& other) {
    for (std::uint64_t i = 1 + below(4); i > 0; --i) mutate(bytes, other);
    return bytes;
  }

 private:
  std::uint64_t below(std::uint64_t n) { return n == 0 ? 0 : random_() % n; }

  void mutate(std::string& bytes, const std::string& other) {
    static constexpr unsigned char kValues[] = {0, 1, 0x7f, 0x80, 0xff};
    const std::size_t at = below(bytes.size() + 1);
    const std::size_t length = below(std::min<std::size_t>(bytes.size() - at, 16) + 1);
    switch (below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes.replace(at, length, length, static_cast<char>(kValues[below(5)]));
        break;
      case 2:
        bytes.erase(at, below(2) == 0 ? length : bytes.size());
        break;
      case 3:
        bytes.insert(at, bytes.substr(below(bytes.size() + 1), 16));
        break;
      case 4: {
        const std::size_t from = below(other.size() + 1);
        bytes.replace(at, length, other.substr(from, below(32)));
        break;
      }
      default:
        if (at < bytes.size()) bytes[at] = static_cast<char>(below(256));
    }
  }

  std::mt19937_64 random_;
};

class Fuzz : public testing::TestWithParam<Target> {};

TEST_P(Fuzz, CorpusAndMutationsEndInTypedErrorsAtMost) {
  constexpr int kMutations = 3000;
  const Target& fuzzed = GetParam();
  const std::vector<std::string> seeds = fuzzed.seeds();
  ASSERT_FALSE(seeds.empty());
  EXPECT_GT(std::count_if(seeds.begin(), seeds.end(), fuzzed.read), 0);
  Mutator mutate(20261122);
  std::mt19937_64 random(1);
  for (int i = 0; i < kMutations; ++i) {
    fuzzed.read(mutate(seeds[random() % seeds.size()], seeds[random() % seeds.size()]));
  }
}
INSTANTIATE_TEST_SUITE_P(Readers, Fuzz, testing::ValuesIn(targets()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace cairn::fuzz
