// Memory that the ranks of one host share: a ring of bytes from each rank to each other one, and
// for each rank a place to sleep and what the others need to know of it.
//
// It is a memfd, which has no name and ends with the last process that maps it. The first rank
// makes it, the others open it through /proc. Whoever maps it may write anything: what is read from
// it is checked, and its size is sealed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cairn::parallel {

/// One process's mapping.
class ShmSegment {
 public:
  /// Throws CommunicationError where the system has no memory to share.
  static std::shared_ptr<ShmSegment> create(int ranks);
  /// Opens what a process of this host made; `address` is its address(). Throws CommunicationError.
  static std::shared_ptr<ShmSegment> open(const std::string& address);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  int ranks() const { return ranks_; }
  std::uint64_t nonce() const { return nonce_; }
  std::size_t ring_bytes() const { return ring_bytes_; }
  /// For open(), as long as close_file() has not been called.
  std::string address() const;
  void close_file();

  /// Bytes written and read so far, by the one who writes and the one who reads.
  struct Positions {
    alignas(128) std::atomic<std::uint64_t> written;
    alignas(128) std::atomic<std::uint64_t> read;
    std::atomic<std::uint32_t> reads_memory;  // 1: the reader can read the writer's own memory
  };
  Positions& positions(int from, int to) const;
  std::byte* ring(int from, int to) const;

  struct Bell {
    alignas(128) std::atomic<std::uint32_t> rings;
    std::atomic<std::uint32_t> asleep;
  };
  Bell& bell(int rank) const;

  /// Written by the rank.
  struct Owner {
    alignas(128) std::atomic<std::int32_t> pid;
    std::atomic<std::uint64_t> nonce_at;  // an address in its memory, where the nonce is
    std::atomic<std::uint32_t> gave_up;   // 1: what it had offered of its memory may have changed
    std::atomic<std::int32_t> core;       // where it last waited, + 1; 0: nowhere yet
  };
  Owner& owner(int rank) const;
  // Who goes to sleep says so and then looks at positions once more; who moves a position then
  // looks who sleeps. These four are in one order (seq_cst), so one of the two sees the other.
  /// Wakes the rank if it sleeps.
  void wake(int rank) const;
  /// Sleeps until somebody wakes this rank, or a while. `find` looks once more before.
  template <class Find>
  bool sleep(int rank, Find&& find) const;

 private:
  ShmSegment(int fd, int ranks, std::size_t ring_bytes, std::uint64_t nonce);
  void map();
  static void sleep_on(Bell& bell, std::uint32_t seen);
  std::size_t pair(int from, int to) const;

  int fd_;
  int ranks_;
  std::size_t ring_bytes_;
  std::uint64_t nonce_;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

template <class Find>
bool ShmSegment::sleep(int rank, Find&& find) const {
  Bell& mine = bell(rank);
  const std::uint32_t seen = mine.rings.load();
  mine.asleep.store(1);
  const bool found = find();
  if (!found) sleep_on(mine, seen);
  mine.asleep.store(0);
  return found;
}

}  // namespace cairn::parallel
