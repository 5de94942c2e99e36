// What the tests of the loader share: a dataset of numbers, and what came of a pass over it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/data/loader.h"

namespace cairn::data::testing {

using Indices = std::vector<std::int64_t>;

/// Sample i is [i, i + 0.5] with label 10 i. Counts its reads; throws at one index, for good or a
/// number of times; may take its time.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  SampleSpec spec() const override { return {{2}, DType::f32, {}, DType::i64}; }
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override {
    ++reads;
    if (index == throws_at && failures-- > 0) throw core::DataError("[numbers] sample is damaged");
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    input.as<float>()[0] = static_cast<float>(index);
    input.as<float>()[1] = static_cast<float>(index) + 0.5f;
    *label.as<std::int64_t>() = 10 * index;
  }

  mutable std::atomic<std::int64_t> reads{0};
  std::int64_t throws_at = -1;
  mutable std::atomic<int> failures{1 << 30};
  std::chrono::microseconds delay{0};

 private:
  std::int64_t size_;
};

struct Seen {
  Indices indices;
  std::vector<double> inputs;
  Indices labels;
  bool operator==(const Seen&) const = default;
};

inline Seen look(const Batch& batch) {
  return {batch.indices, batch.inputs.to_vector(), batch.labels.to_vector<std::int64_t>()};
}

inline std::vector<Seen> collect(DataLoader& loader) {
  std::vector<Seen> batches;
  for (const Batch& batch : loader) batches.push_back(look(batch));
  return batches;
}

inline Indices all_indices(const std::vector<Seen>& batches) {
  Indices all;
  for (const Seen& batch : batches)
    all.insert(all.end(), batch.indices.begin(), batch.indices.end());
  return all;
}

struct Threads {
  int workers, prefetch;
};
inline constexpr Threads kThreads[] = {{0, 1}, {1, 1}, {1, 4}, {3, 2}, {4, 8}};

}  // namespace cairn::data::testing
