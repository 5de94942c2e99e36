// A list of update entries on the device: the table of pointers, and the entries' scalars where
// they differ.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda/optimizer_update.cuh"
#include "cuda/table.h"

namespace cairn::kernels::cuda {

/// Carries scalars to the device as a kernel's argument, so that the host need not wait for a copy.
struct ScalarsBatch {
  static constexpr int kSize = 256;
  EntryScalars values[kSize];
};
static __global__ void put_scalars_kernel(ScalarsBatch batch, int count, EntryScalars* to) {
  const int k = static_cast<int>(threadIdx.x);
  if (k < count) to[k] = batch.values[k];
}

inline std::vector<Slot> slots_of(const std::vector<UpdateEntry>& entries) {
  std::vector<Slot> slots;
  for (const UpdateEntry& e : entries) {
    slots.push_back(slot_of({e.gradient, e.weight, e.master, e.moment1, e.moment2}));
  }
  return slots;
}

class DeviceScalars {
 public:
  template <class Options>
  DeviceScalars(const Queue& queue, const std::vector<UpdateEntry>& entries,
                const Options& options) {
    std::vector<EntryScalars> values;
    for (const UpdateEntry& e : entries) values.push_back(scalars_of(e, options));
    list_ = {values.front(), nullptr};
    const auto differs = [&](const EntryScalars& s) {
      return std::memcmp(&s, values.data(), sizeof(s)) != 0;
    };
    if (std::any_of(values.begin(), values.end(), differs)) upload(queue, values);
  }
  const ListScalars& list() const { return list_; }

 private:
  void upload(const Queue& queue, const std::vector<EntryScalars>& values) {
    memory_ = std::make_unique<Buffer<EntryScalars>>(queue, std::ssize(values));
    for (std::size_t at = 0; at < values.size(); at += ScalarsBatch::kSize) {
      ScalarsBatch batch{};
      const std::size_t count = std::min<std::size_t>(ScalarsBatch::kSize, values.size() - at);
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(at), count, batch.values);
      launch(queue, {1, ScalarsBatch::kSize}, put_scalars_kernel, batch, static_cast<int>(count),
             memory_->data() + at);
    }
    list_.each = memory_->data();
  }

  std::unique_ptr<Buffer<EntryScalars>> memory_;
  ListScalars list_;
};

}  // namespace cairn::kernels::cuda
