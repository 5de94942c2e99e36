// Pointer tables in device memory for multi-tensor passes. The last few tables of each stream are
// kept: a training step hands in the same list every time, and then nothing is uploaded. Those of
// kernels::PassingLists end with it; tables that a captured CUDA graph refers to are kept for good.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "cuda/queue.h"

namespace cairn::kernels::cuda {

inline constexpr std::int64_t kChunk = 1 << 14;  // elements
inline constexpr int kLanes = 8;                 // elements a thread moves at once
inline constexpr int kSlotViews = 5;

/// One tensor, or several dense ones of one layout that belong together. What each is, the pass
/// says; absent ones are nullptr.
struct Slot {
  void* data[kSlotViews];
  std::int64_t count;
  DType dtype[kSlotViews];
};

Slot empty_slot();  // its padding too is zero: tables are compared as bytes
Slot slot_of(std::initializer_list<TensorView> views);

/// Slots of these lengths cut into chunks, the last of each as short as need be. Elements are
/// counted in 64 bits, chunks in 32.
struct Chunks {
  std::vector<std::int32_t> slot;   // of each chunk
  std::vector<std::int32_t> first;  // of each slot, and the end
};
Chunks cut(const std::vector<std::int64_t>& counts);

/// In device memory.
struct Table {
  const Slot* slots;
  const std::int32_t* chunk_slot;   // the slot of each chunk
  const std::int32_t* first_chunk;  // [slots + 1]
  std::int32_t slot_count, chunk_count;
};

/// once: of tensors that come and go; the table ends with its owner, and a capture cannot have it.
enum class TableUse { each_step, once };

class DeviceTable {
 public:
  DeviceTable(const Queue& queue, const std::vector<Slot>& slots,
              TableUse use = TableUse::each_step);
  const Table& table() const { return table_; }

 private:
  std::shared_ptr<core::Storage> memory_;
  Table table_;
};

}  // namespace cairn::kernels::cuda
