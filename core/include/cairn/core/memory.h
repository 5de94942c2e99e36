// Memory: one caching allocator per device, with accounting by category, peaks and an optional
// capacity.
//
// Every allocation belongs to a category, taken from the innermost MemoryCategoryGuard of the
// calling thread. Freed blocks are kept for reuse, in stream order: a block allocated while a
// stream is current serves no other work before that stream's queued work is done (on CUDA the same
// stream may have it back at once). Where a request fails or would pass the capacity
// (CAIRN_DEVICE_MEMORY, or set_capacity), cached blocks are released and the request tried once
// more; then OutOfMemory says what was asked, what each category holds, the largest live tensors,
// and what would help.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "cairn/core/device.h"
#include "cairn/core/write_count.h"

namespace cairn::core {

enum class MemoryCategory : std::uint8_t {
  parameters,
  gradients,
  optimizer_state,
  activations,
  workspace,
  communication,
  other
};
inline constexpr int kMemoryCategories = 7;
std::string_view name(MemoryCategory category);

/// What a device's memory holds: bytes of live tensors, by category and in all, now and at their
/// peak since the last reset_peak_memory(), and the bytes that the allocator holds, live and
/// cached.
struct MemoryStats {
  std::array<std::size_t, kMemoryCategories> current{};
  std::array<std::size_t, kMemoryCategories> peak{};
  std::size_t current_total = 0;
  std::size_t peak_total = 0;
  std::size_t reserved = 0;
  std::uint64_t allocations = 0;         // requests that were served
  std::uint64_t system_allocations = 0;  // those of them that the cache could not serve

  std::size_t of(MemoryCategory category) const {
    return current[static_cast<std::size_t>(category)];
  }
  std::size_t peak_of(MemoryCategory category) const {
    return peak[static_cast<std::size_t>(category)];
  }
};

MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);
std::size_t memory_capacity(Device device);  // bytes; SIZE_MAX where unlimited
/// Caps the bytes of live tensors on the device; SIZE_MAX lifts the cap.
void set_memory_capacity(Device device, std::size_t bytes);
void release_cached_memory(Device device);
/// The statistics and the largest live tensors as a table for people to read.
std::string memory_report(Device device);

class [[nodiscard]] MemoryCategoryGuard {
 public:
  explicit MemoryCategoryGuard(MemoryCategory category);
  ~MemoryCategoryGuard();
  MemoryCategoryGuard(const MemoryCategoryGuard&) = delete;
  MemoryCategoryGuard& operator=(const MemoryCategoryGuard&) = delete;
  static MemoryCategory current();

 private:
  MemoryCategory previous_;
};

class Allocator;
class Stream;
struct StorageUses;

/// A block of device memory, freed with its last owner. `version` counts writes that other code
/// must notice (cast caches, saved tensors): those of kernels, which bump it through their views,
/// and those that somebody reports with bump_version().
class Storage {
 public:
  /// A block of uninitialised memory, aligned to 64 bytes. Throws OutOfMemory.
  static std::shared_ptr<Storage> allocate(std::size_t bytes, Device device);
  /// Host memory, of cpu:0: page-locked where CUDA is present, ordinary elsewhere.
  static std::shared_ptr<Storage> allocate_pinned(std::size_t bytes);
  /// Memory that somebody else owns; the storage drops `owner` when it ends.
  static std::shared_ptr<Storage> wrap(void* data, std::size_t bytes, Device device,
                                       std::shared_ptr<void> owner);

  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  MemoryCategory category() const { return category_; }
  bool pinned() const { return pinned_; }
  void set_category(MemoryCategory category);  // moves its bytes in the accounts
  /// Says that work queued on `stream` uses the block too, so that the block, once freed, is not
  /// reused before that work is done. The stream that was current when the block was allocated is
  /// known already, and foreign memory is never reused.
  void record_use(const Stream& stream);
  /// Of foreign memory that a container owns: where the container holds its elements now.
  void set_whereabouts(std::function<const void*()> now) { whereabouts_ = std::move(now); }
  /// Where the container holds them: data(), unless it has moved them, as a vector does that grows.
  const void* whereabouts() const { return whereabouts_ ? whereabouts_() : data_; }

  // Memory that comes and goes: of a weight that is whole only while it is used (ZeRO, stage 3), or
  // that nobody has asked for yet (deferred.h). Tensors of the storage live on; where one is asked
  // for its elements meanwhile, `bring` is called, which sets memory, or throws.

  /// Gives the memory back. Throws Unsupported for foreign and for pinned memory.
  void make_returnable(std::function<void()> bring, std::string deferred = {});
  /// What make_returnable was told, until memory is set.
  const std::string& deferred() const;
  /// Of the same size and device; null: gives back what was set.
  void set_memory(std::shared_ptr<Storage> memory);
  bool returnable() const { return returnable_ != nullptr; }
  bool can_return() const { return returnable_ != nullptr || (allocator_ != nullptr && !pinned_); }
  bool has_memory() const { return data_ != nullptr || bytes_ == 0; }
  /// Where a tensor's elements are now. `origin`: what origin_of() gave for where they once were.
  void* locate(void* origin) const;
  void* origin_of(void* address) const;

  std::uint64_t version() const { return version_.value(); }
  void bump_version() { version_.count_write(); }  // that has happened
  WriteCount& version_counter() { return version_; }

 private:
  friend class Allocator;
  Storage() = default;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_;
  MemoryCategory category_ = MemoryCategory::other;
  bool pinned_ = false;
  WriteCount version_;
  std::shared_ptr<void> owner_;  // of foreign memory
  std::function<const void*()> whereabouts_;
  struct Returnable;
  std::unique_ptr<Returnable> returnable_;  // null: the memory stays

  // What the allocator keeps here; null for foreign memory.
  Allocator* allocator_ = nullptr;
  std::size_t block_bytes_ = 0;  // what the block holds, at least bytes_
  void* stream_ = nullptr;       // CUDA: whose order the block is reused in
  // Further streams whose work may use it; null where there are none.
  std::unique_ptr<StorageUses> uses_;
  Storage* previous_ = nullptr;  // the list of live storages, for reports
  Storage* next_ = nullptr;
};

}  // namespace cairn::core
