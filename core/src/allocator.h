// The caching allocator: one for each device, and one for pinned host memory.
//
// A freed block waits for the next request (of its CUDA stream: work queued before it was freed is
// done before later work of the same stream touches it again). Where no block fits:
//   - Host memory comes in size classes, eight to a doubling: freed blocks fit later requests, and
//     at most an eighth is lost. From 2 MiB on its pages can be moved: cached blocks are cut and
//     put together, and the system is asked for what they lack.
//   - Elsewhere blocks are parts of what the system gave at once (a segment). A request takes the
//     smallest free part that holds it, and free neighbours become one again. A segment has a
//     little more than what is asked for: lengths that change from step to step soon need nothing
//     more of the system. (CAIRN_SEGMENTS=0: size classes, each block by itself, for tools that
//     look for accesses beyond one.)
// Cached memory (of segments: whole ones) goes back to the system where a request fails, would take
// the device past its capacity, or would take the allocator far past the most that was ever live.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "memory_tracer.h"

namespace cairn::core {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;
/// Blocks from kHugePage on are multiples: small enough that rounding up costs a tensor little.
inline constexpr std::size_t kPage = std::size_t{128} << 10;

struct StorageUses {
  std::vector<Stream> streams;
};

/// Where an allocator's blocks come from.
class SystemMemory {
 public:
  virtual ~SystemMemory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  // nullptr where there is not that much
  virtual void release(void* data, std::size_t bytes) noexcept = 0;

  /// What is allocated at once may serve several requests: the allocator cuts it.
  virtual bool gives_segments() const { return false; }

  /// Blocks from kHugePage on may be cut anywhere between pages (of kPage), their parts released
  /// apart, and pages moved between them.
  virtual bool moves_pages() const { return false; }
  /// Moves whole pages, with their physical memory, onto those at `to`; none are left at `from`.
  /// Returns how many bytes of `to` are in order: all, or the next page is not mapped any more.
  virtual std::size_t move_pages(void* from, void* to, std::size_t bytes) noexcept;
  virtual void release_pages(void* data, std::size_t bytes) noexcept;  // a part of a block
};

/// Bytes of the block of host memory that serves a request: 64-byte steps, eight classes to a
/// doubling, whole pages from kHugePage on.
std::size_t block_size(std::size_t bytes);

class Allocator {
 public:
  Allocator(Device device, bool pinned, SystemMemory* system);

  /// Fills in storage's memory. Throws OutOfMemory.
  void allocate(Storage& storage, std::size_t bytes, MemoryCategory category, void* stream);
  void free(Storage& storage) noexcept;
  void move_category(Storage& storage, MemoryCategory to);

  MemoryStats stats();
  void reset_peak();
  std::size_t capacity();
  void set_capacity(std::size_t bytes);
  void set_cache_bound(std::size_t bytes);
  void release_cached();
  /// Blocks that are freed in this stream's order are for it alone, until release().
  void retain(void* stream);
  /// Gives them back to the system: nothing on the device uses them any more.
  void release(void* stream) noexcept;
  std::string report();
  /// Keeps the last so many events; 0: none.
  void trace(std::size_t events);
  MemoryTrace trace();

 private:
  using CacheKey = std::pair<std::size_t, void*>;  // block size, stream
  using Cache = std::map<CacheKey, std::vector<void*>>;
  struct Pending {  // a freed block
    CacheKey key;
    void* data = nullptr;
    std::vector<Event> uses = {};      // points after which nobody uses it
    std::vector<Stream> streams = {};  // of further uses; their points are to be marked
    bool until_graph_ends = false;
    std::size_t requested = 0;
  };

  struct SystemBlock {  // what the system gave at once, and on which stream it was asked for
    std::size_t bytes = 0;
    void* stream = nullptr;
  };

  struct Block {
    void* data = nullptr;  // null: none
    std::size_t bytes = 0;
  };

  struct OwnBlock {
    MemorySegment::Block block;
    void* stream = nullptr;
  };

  class Lock;

  Block take_block(Lock& lock, std::size_t block_bytes, void* stream);
  Block cached_block(std::size_t block_bytes, void* stream);
  Block cut(Cache::iterator from, std::size_t bytes);
  Block joined_block(std::size_t block_bytes, void* stream);
  void put_back(const std::vector<Block>& pieces, std::size_t from, void* stream) noexcept;
  void give_up_joining(char* data, std::size_t gap, std::size_t block_bytes) noexcept;
  Block take_cached_pages(std::size_t bytes, void* stream);
  std::size_t segment_for(std::size_t block_bytes) const;
  Block system_block(Lock& lock, std::size_t wanted, std::size_t least);
  void* ask_system(Lock& lock, std::size_t block_bytes);
  bool over_capacity(std::size_t bytes) const;
  void trim_for(std::size_t block_bytes);
  void release_cached_locked(
      std::size_t bytes = SIZE_MAX) noexcept;  // at least so many, where there are
  std::size_t release_blocks(Cache::iterator blocks, std::size_t bytes) noexcept;
  bool is_whole(void* data, std::size_t block_bytes) const;
  void give_back(void* data, std::size_t block_bytes) noexcept;
  void return_parts(void* stream) noexcept;
  void forget(Storage& storage) noexcept;
  void keep_block(const Storage& storage);
  void end_use(const Pending& block) noexcept;
  void cache_block(CacheKey key, void* data) noexcept;
  char* join_neighbours(CacheKey& key, char* data);
  std::size_t take_out(std::map<char*, CacheKey>::iterator block) noexcept;
  static void mark_uses(Pending& block) noexcept;
  static bool all_done(Pending& block) noexcept;
  void collect_pending() noexcept;
  void wait_for_pending_cuda(Lock& lock);
  void count(std::size_t bytes, MemoryCategory category);
  void link(Storage& storage);
  void unlink(Storage& storage);
  [[noreturn]] void fail_out_of_memory(std::size_t bytes, MemoryCategory category) const;
  void note(MemoryEvent::Action action, const Block& block, const void* stream = nullptr,
            MemoryCategory category = MemoryCategory::other) const noexcept;       // needs mutex_
  void note_cut(const Block& whole, std::size_t at, void* stream) const noexcept;  // too
  std::vector<OwnBlock> blocks() const;                                            // by address
  std::string table() const;
  std::string largest_tensors() const;

  const Device device_;
  const bool pinned_;
  SystemMemory* const system_;
  const bool cuts_;  // blocks are parts of segments
  std::mutex mutex_;
  Cache cache_;
  std::map<char*, SystemBlock> segments_;  // by where they begin
  std::map<char*, CacheKey> free_at_;      // cached parts of segments
  std::list<Pending> pending_;
  std::vector<Block> leaving_;  // for the system, once the lock is released
  std::set<void*> retained_;    // streams of graphs
  std::size_t cached_ = 0;      // bytes in cache_
  std::size_t most_live_ = 0;   // bytes of live blocks, at most ever
  std::size_t capacity_;
  std::size_t cache_bound_ = SIZE_MAX;  // of live and cached bytes
  MemoryStats stats_;
  Storage* live_ = nullptr;
  std::unique_ptr<MemoryTracer> tracer_;  // null: nobody asked for one
};

Allocator& allocator_of(Device device);  // checks that the device exists
Allocator& pinned_allocator();           // of page-locked host memory; CUDA builds only

/// The capacity that CAIRN_DEVICE_MEMORY gives a device: "512M" for each one, or
/// "cpu:0=1G,cpu:1=512M"; SIZE_MAX where it says nothing.
std::size_t capacity_from_environment(Device device);

/// "1.5 MiB"
std::string readable_bytes(std::size_t bytes);

}  // namespace cairn::core
