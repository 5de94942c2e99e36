#include "cuda/table.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>

#include "cairn/core/error.h"
#include "cairn/kernels/passing_lists.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kKeptTables = 1024;  // an optimizer has a few, DDP one a bucket

struct KeptTable {
  Device device;
  const void*
      stream;  // memory goes back to the stream it was taken on, so a table serves one stream
  std::vector<std::byte> bytes;
  std::shared_ptr<core::Storage> memory;
  bool captured;  // a graph holds its address
};

class KeptTables {
 public:
  /// Null where there is none.
  std::shared_ptr<core::Storage> find(const Queue& queue, const std::vector<std::byte>& bytes,
                                      bool capturing) {
    const std::lock_guard lock(mutex_);
    for (auto it = tables_.begin(); it != tables_.end(); ++it) {
      if (it->device == queue.device() && it->stream == queue.stream() && it->bytes == bytes) {
        tables_.splice(tables_.begin(), tables_, it);
        it->captured = it->captured || capturing;
        return it->memory;
      }
    }
    return nullptr;
  }

  void keep(KeptTable table) {
    const std::lock_guard lock(mutex_);
    tables_.push_front(std::move(table));
    forget();
  }

 private:
  /// Lets go of the table unused for longest, where there are too many.
  void forget() {
    if (tables_.size() <= kKeptTables) return;
    const auto last = std::find_if(tables_.rbegin(), tables_.rend(),
                                   [](const KeptTable& table) { return !table.captured; });
    if (last != tables_.rend()) tables_.erase(std::next(last).base());
  }

  std::mutex mutex_;
  std::list<KeptTable> tables_;  // the last used first
};

KeptTables& kept_tables(bool capturing) {
  static auto& kept = *new KeptTables;  // never destroyed: device memory must not be freed at exit
  std::shared_ptr<void>* const passing = capturing ? nullptr : PassingLists::kept();
  if (passing == nullptr) return kept;
  if (!*passing) *passing = std::make_shared<KeptTables>();
  return *static_cast<KeptTables*>(passing->get());
}

std::shared_ptr<core::Storage> upload(const Queue& queue, const std::vector<std::byte>& bytes) {
  auto memory = queue.workspace(bytes.size());
  queue.upload(memory->data(), bytes.data(), bytes.size());
  return memory;
}

/// Uploads without a lock: that may wait for the device, and that for other threads' devices.
std::shared_ptr<core::Storage> find_or_upload(const Queue& queue, std::vector<std::byte> bytes) {
  const bool capturing = queue.capturing();
  KeptTables& kept = kept_tables(capturing);
  if (auto memory = kept.find(queue, bytes, capturing)) return memory;
  CAIRN_CHECK(
      !capturing, queue.op(),
      "expected a list that ran on this stream before the capture, got a new one (its table "
      "of pointers cannot be uploaded while a graph is captured)");
  auto memory = upload(queue, bytes);
  kept.keep({queue.device(), queue.stream(), std::move(bytes), memory, false});
  return memory;
}

template <class T>
void put(std::byte*& at, const std::vector<T>& values) {
  if (values.empty()) return;
  std::memcpy(at, values.data(), values.size() * sizeof(T));
  at += values.size() * sizeof(T);
}

}  // namespace

Slot empty_slot() {
  Slot slot;
  std::memset(&slot, 0, sizeof(slot));
  return slot;
}

Slot slot_of(std::initializer_list<TensorView> views) {
  Slot slot = empty_slot();
  slot.count = views.begin()->numel();
  int k = 0;
  for (const TensorView& view : views) {
    slot.data[k] = view.data;
    slot.dtype[k++] = view.dtype;
  }
  return slot;
}

Chunks cut(const std::vector<std::int64_t>& counts) {
  Chunks chunks;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    chunks.first.push_back(static_cast<std::int32_t>(chunks.slot.size()));
    const auto n = static_cast<std::size_t>((counts[k] + kChunk - 1) / kChunk);
    chunks.slot.insert(chunks.slot.end(), n, static_cast<std::int32_t>(k));
  }
  chunks.first.push_back(static_cast<std::int32_t>(chunks.slot.size()));
  return chunks;
}

DeviceTable::DeviceTable(const Queue& queue, const std::vector<Slot>& slots, TableUse use) {
  std::vector<std::int64_t> counts;
  for (const Slot& slot : slots) counts.push_back(slot.count);
  const auto [chunk_slot, first_chunk] = cut(counts);

  std::vector<std::byte> bytes(slots.size() * sizeof(Slot) +
                               (chunk_slot.size() + first_chunk.size()) * sizeof(std::int32_t));
  std::byte* at = bytes.data();
  put(at, slots), put(at, chunk_slot), put(at, first_chunk);

  memory_ = use == TableUse::once ? upload(queue, bytes) : find_or_upload(queue, std::move(bytes));
  const auto* const data = static_cast<const std::byte*>(memory_->data());
  table_.slots = reinterpret_cast<const Slot*>(data);
  table_.chunk_slot = reinterpret_cast<const std::int32_t*>(data + slots.size() * sizeof(Slot));
  table_.first_chunk = table_.chunk_slot + chunk_slot.size();
  table_.slot_count = static_cast<std::int32_t>(slots.size());
  table_.chunk_count = static_cast<std::int32_t>(chunk_slot.size());
}

}  // namespace cairn::kernels::cuda
