// The random numbers of one sample.
#pragma once

#include "cairn/core/generator.h"

namespace cairn::data::detail {

/// While it lives, the calling thread's generator draws what belongs to a sample, and nothing but
/// the seed, the epoch and the sample's number decide what that is. Then it is what it was.
class SampleDraws {
 public:
  SampleDraws(std::uint64_t seed, std::int64_t epoch, std::int64_t index)
      : saved_(Generator::current()) {
    const auto key =
        core::philox(seed, static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(index));
    Generator::current().set(std::uint64_t{key[0]} << 32 | key[1]);
  }
  ~SampleDraws() { Generator::current() = saved_; }
  SampleDraws(const SampleDraws&) = delete;
  SampleDraws& operator=(const SampleDraws&) = delete;

 private:
  Generator saved_;
};

}  // namespace cairn::data::detail
