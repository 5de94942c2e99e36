// What a search tries that draws without RapidCheck, which reads RC_PARAMS itself.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace cairn::test {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  T of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(static_cast<int>(list.size())))];
  }

 private:
  std::mt19937_64 random_;
};

/// A number that an environment variable overrides.
inline int number_in(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

/// Of RC_PARAMS="seed=...", which scripts/test takes from the commit's tree; else drawn. Printed.
inline std::uint64_t search_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("RC_PARAMS");
    const std::string parameters = text == nullptr ? "" : text;
    const std::size_t at = parameters.find("seed=");
    const std::uint64_t chosen = at == std::string::npos
                                     ? std::random_device{}()
                                     : std::strtoull(parameters.c_str() + at + 5, nullptr, 10);
    std::printf("RC_PARAMS=\"seed=%llu\"\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

/// One for each of as many cases as CAIRN_STATEFUL_SEQUENCES or, without, `usual` says: to be
/// repeated as RC_PARAMS="seed=..." CAIRN_STATEFUL_SEQUENCES=1.
inline std::vector<std::uint64_t> search_seeds(int usual) {
  const int count = number_in("CAIRN_STATEFUL_SEQUENCES", usual);
  std::vector<std::uint64_t> seeds(static_cast<std::size_t>(count > 0 ? count : 0));
  std::iota(seeds.begin(), seeds.end(), search_seed());
  return seeds;
}

}  // namespace cairn::test
