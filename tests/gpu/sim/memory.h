// Memory of the simulated GPUs. Each GPU owns a range of addresses that host code can never touch:
// its pages are inaccessible but while the machine runs work that names them. An address is never
// given twice. Beside each page stands a shadow: what is defined, and which work last wrote and
// read each two bytes, from which races are found.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/sim/order.h"

namespace cairn::gpusim {

inline constexpr std::uintptr_t kArena = 0x200000000000;  // clear of sanitizers' shadows
inline constexpr std::size_t kArenaOfGpu = std::size_t{1} << 37;
inline constexpr int kMostGpus = 8;
inline constexpr std::size_t kPage = 4096, kCell = 2, kCells = kPage / kCell;

struct Allocation {
  int device;
  char* pages;
  std::size_t mapped_bytes;  // whole pages
  char* begin;
  std::size_t bytes;  // as asked for
  bool open = false;  // accessible now
};

/// A run of cells, and the work that last touched it.
struct Touch {
  std::uint16_t begin, end;
  bool write;
  Point point;
  std::shared_ptr<const std::string> name;
};

struct PageShadow {
  Allocation* allocation;
  char* base;
  std::uint64_t work = 0;  // whose read and written cells these are
  std::bitset<kCells> read, written, defined;
  std::vector<Touch> touches;
};

/// What runs now.
struct Running {
  std::uint64_t number = 0;
  int device = 0;
  Point point;
  const Clock* clock = nullptr;
  std::shared_ptr<const std::string> name;
  bool kernel = false;  // undefined values may be copied, but not computed with
  bool peers = false;   // may reach every GPU's memory
};

class Memory {
 public:
  void start(int gpus, std::size_t bytes_of_each);

  void* allocate(int device, std::size_t bytes);  // nullptr: that GPU is full
  bool release(void* data);                       // false: no such allocation
  void* allocate_pinned(std::size_t bytes);
  bool release_pinned(void* data);

  bool is_device(const void* data) const {
    return reinterpret_cast<std::uintptr_t>(data) - kArena < kArenaOfGpu * kMostGpus;
  }
  Allocation* allocation_of(const void* data);
  bool is_pinned(const void* data, std::size_t bytes) const;
  std::size_t bytes_left(const void* data);
  std::string describe(const void* data);
  std::size_t used(int device) const { return used_[device]; }
  std::size_t capacity() const { return capacity_; }

  void allow_peer(int device, int peer) { peers_[device] |= 1u << peer; }
  bool reaches(int device, int peer) const {
    return device == peer || (peers_[device] >> peer & 1u) != 0;
  }

  void begin(const Running& running) { running_ = running; }
  Running& running() { return running_; }
  /// One access of the running work to device memory.
  void access(const void* data, std::size_t bytes, bool write);
  /// Compares what the running work touched with what went before it; reports races.
  void end();
  /// Takes the pages away again that work was given.
  void close_all();
  /// A host's touch of an address: opens the page where the machine itself runs work.
  bool open_for_machine(const void* data);

 private:
  PageShadow*& shadow(std::uintptr_t page) { return shadows_[page]; }
  void open(Allocation& allocation);
  void mark(PageShadow& page, std::size_t first, std::size_t last, bool write);
  void check(PageShadow& page);
  void settle(PageShadow& page, std::uint16_t begin, std::uint16_t end, bool write);
  [[noreturn]] void fail(const char* kind, const void* data, std::size_t bytes, bool write,
                         const std::string& why);

  std::size_t capacity_ = 0;
  std::size_t used_[kMostGpus] = {};
  std::uintptr_t next_[kMostGpus] = {};
  unsigned peers_[kMostGpus] = {};
  std::map<const void*, std::unique_ptr<Allocation>> allocations_;
  std::map<const void*, std::size_t> pinned_;
  PageShadow** shadows_ = nullptr;  // by page number within the arena
  std::vector<Allocation*> open_;
  std::vector<PageShadow*> touched_;
  Running running_;
};

}  // namespace cairn::gpusim
