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

inline Slot slot_of(const UpdateItem& item) {
  Slot slot = empty_slot();
  slot.count = item.count;
  void* const data[] = {item.gradient, item.weight, item.master, item.moment1, item.moment2};
  std::copy_n(data, kSlotViews, slot.data);
  const DType dtypes[] = {item.gradient_dtype, item.weight_dtype, item.master_dtype,
                          item.moment_dtype, item.moment_dtype};
  std::copy_n(dtypes, kSlotViews, slot.dtype);
  return slot;
}

inline std::vector<Slot> slots_of(const UpdateList& list) {
  std::vector<Slot> slots;
  slots.reserve(list.items.size());
  for (const UpdateItem& item : list.items) slots.push_back(slot_of(item));
  return slots;
}

class DeviceScalars {
 public:
  template <class Options>
  DeviceScalars(const Queue& queue, const UpdateList& list, const Options& options) {
    std::vector<EntryScalars> values;
    for (const UpdateItem& item : list.items) values.push_back(scalars_of(item, options));
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

void update_on_device(const UpdateList& list, const UpdateRule& rule,
                      const DeviceStep& device);  // device_step.cu

}  // namespace cairn::kernels::cuda
