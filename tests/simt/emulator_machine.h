// The machine behind emulator.h: fibers, the scheduler, barriers and warp exchanges. Include
// emulator.h, not this.
#pragma once

#include <array>
#include <exception>
#include <memory>
#include <random>
#include <vector>

#include "simt/fiber.h"

namespace cairn::simt {

class Machine {
 public:
  static Machine& current();

  /// What a lane learns from the others of its mask.
  struct Exchange {
    std::uint64_t value = 0;
    unsigned votes = 0;
  };

  /// What a whole warp does together, once: with a value of each lane.
  using Together = void(const std::array<std::uint64_t, kWarpSize>& values);

  void run(const Launch& shape, const Kernel& kernel);

  void barrier(const Site& site);
  Exchange warp_exchange(unsigned mask, std::uint64_t value, int source, const Site& site,
                         Together* together = nullptr);
  void* shared_memory(const void* key, std::size_t bytes);
  void* dynamic_shared_memory();  // not inline: kernels must not read the machine itself
  /// Whether the bytes are shared memory of the block that runs.
  bool is_shared(const void* data, std::size_t bytes) const;

  void copy_async(void* to, const void* from, const Site& site);
  void wait_for_copies();

 private:
  enum class State { fresh, ready, barrier, warp, ended };
  struct Copy {
    void* to;
    std::array<std::byte, 16> bytes;
  };
  struct Thread {
    State state = State::fresh;
    dim3 index;
    Fiber* fiber = nullptr;    // of a thread that waits or goes on after waiting
    std::vector<Copy> copies;  // under way
  };
  struct Group {  // lanes that meet in one warp function; groups of a warp are disjoint
    unsigned mask = 0, arrived = 0;
    Site site;
  };
  struct Warp {
    unsigned alive = 0;
    std::vector<Group> groups;
    std::array<std::uint64_t, kWarpSize> values{};
    std::array<int, kWarpSize> sources{};
    std::array<Exchange, kWarpSize> results{};
  };
  struct SharedArray {
    const void* key;
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
  };

  [[noreturn]] void fail(const std::string& what, const Site& site);
  std::vector<std::size_t> visiting_order(std::size_t count);
  void start_block();
  void run_block();
  void resume(std::size_t thread);
  void make_current(std::size_t thread);
  Fiber* idle_fiber();
  void wait(State state);  // on a fiber
  void release_barrier();
  Group& join(Warp& warp, unsigned mask, const Site& site);
  void resolve(Warp& warp, Group& group, std::size_t first);
  void end_thread();  // on a fiber, when the kernel has returned
  std::string waiting_report() const;
  static void fiber_main();
  void run_threads();

  Launch launch_;
  const Kernel* kernel_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Fiber* running_fiber_ = nullptr;
  std::vector<std::size_t> order_;  // of this pass over the threads, and where it stands
  std::size_t next_ = 0;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<SharedArray> shared_;
  std::unique_ptr<std::byte[]> dynamic_;
  std::size_t shared_bytes_ = 0;
  std::size_t running_ = 0, ended_ = 0, waiting_ = 0;
  Site barrier_site_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
};

/// `source(lane, base)` names the lane to read, in segments of `width` lanes that start at `base`.
template <class T, class Source>
T shuffle(unsigned mask, T value, int width, const Site& site, Source source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
  const unsigned linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int lane = static_cast<int>(linear % kWarpSize);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const int from = source(lane, lane / width * width);
  const std::uint64_t got = Machine::current().warp_exchange(mask, bits, from, site).value;
  std::memcpy(&value, &got, sizeof(T));
  return value;
}

}  // namespace cairn::simt
