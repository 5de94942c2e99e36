#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <utility>

#include "simt/emulator.h"

namespace cairn::simt {
namespace {

constexpr std::size_t kStaticSharedLimit = 48 << 10;
std::atomic<std::size_t> most_shared = 163 << 10;

std::size_t volume(const dim3& d) {
  return std::size_t{d.x} * d.y * d.z;
}
dim3 position(std::size_t linear, const dim3& d) {
  return {static_cast<unsigned>(linear % d.x), static_cast<unsigned>(linear / d.x % d.y),
          static_cast<unsigned>(linear / d.x / d.y)};
}
bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}
void check(const Launch& shape) {
  if (volume(shape.block) == 0 || volume(shape.block) > 1024) {
    throw Error("a block needs 1 to 1024 threads, got " + std::to_string(volume(shape.block)));
  }
  if (volume(shape.grid) == 0 || shape.grid.x > 0x7fffffffu || shape.grid.y > 65535 ||
      shape.grid.z > 65535) {
    throw Error("a grid of " + std::to_string(shape.grid.x) + " x " + std::to_string(shape.grid.y) +
                " x " + std::to_string(shape.grid.z) + " blocks cannot be launched");
  }
  if (shape.shared_bytes > shared_limit()) {
    throw Error("more than " + std::to_string(shared_limit() >> 10) +
                " KiB of shared memory asked");
  }
}
std::unique_ptr<std::byte[]> poisoned(std::size_t bytes) {
  std::unique_ptr<std::byte[]> memory(new std::byte[bytes]);
  std::memset(memory.get(), 0xff, bytes);
  return memory;
}

}  // namespace

std::size_t shared_limit() {
  return most_shared;
}
void set_shared_limit(std::size_t bytes) {
  most_shared = bytes;
}

void require_aligned(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
  throw Error("misaligned: an access of " + std::to_string(bytes) +
              " bytes at an address that is no multiple of it");
}

Machine& Machine::current() {
  static thread_local Machine machine;
  return machine;
}

void Machine::run(const Launch& shape, const Kernel& kernel) {
  check(shape);
  launch_ = shape;
  kernel_ = &kernel;
  gridDim = shape.grid, blockDim = shape.block;
  threads_.resize(volume(shape.block));
  random_.seed(schedule().seed);
  for (std::size_t block : visiting_order(volume(shape.grid))) {
    blockIdx = position(block, shape.grid);
    run_block();
  }
}

void Machine::barrier(const Site& site) {
  if (ended_ > 0) fail("a barrier waits for threads that have ended (divergent barrier)", site);
  if (waiting_ > 0 && !same(site, barrier_site_)) {
    fail("threads of one block wait at different barriers (divergent barrier)", site);
  }
  barrier_site_ = site;
  ++waiting_;
  wait(State::barrier);
}

Machine::Exchange Machine::warp_exchange(unsigned mask, std::uint64_t value, int source,
                                         const Site& site, Together* together) {
  Warp& warp = warps_[running_ / kWarpSize];
  const unsigned lane = static_cast<unsigned>(running_ % kWarpSize), bit = 1u << lane;
  if ((mask & bit) == 0) fail("a lane calls a warp function whose mask leaves it out", site);
  if ((mask & ~warp.alive) != 0) fail("the mask names lanes that ended or do not exist", site);
  if (source >= 0 && (mask >> source & 1u) == 0) fail("a shuffle reads an inactive lane", site);
  Group& group = join(warp, mask, site);
  group.arrived |= bit;
  warp.values[lane] = value, warp.sources[lane] = source;
  if (group.arrived == mask) {
    if (together != nullptr) together(warp.values);
    resolve(warp, group, running_ - lane);
  } else {
    wait(State::warp);
  }
  return warp.results[lane];
}

void* Machine::shared_memory(const void* key, std::size_t bytes) {
  for (const SharedArray& array : shared_) {
    if (array.key == key) return array.memory.get();
  }
  shared_.push_back({key, poisoned(bytes), bytes});
  shared_bytes_ += bytes;
  if (shared_bytes_ > kStaticSharedLimit) throw Error("shared arrays of a block exceed 48 KiB");
  if (shared_bytes_ + launch_.shared_bytes > shared_limit()) {
    throw Error("shared memory of a block exceeds " + std::to_string(shared_limit() >> 10) +
                " KiB");
  }
  return shared_.back().memory.get();
}

void* Machine::dynamic_shared_memory() {
  return dynamic_.get();
}

bool Machine::is_shared(const void* data, std::size_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(data);
  const auto inside = [&](const std::byte* begin, std::size_t size) {
    return begin <= first && first + bytes <= begin + size;
  };
  if (inside(dynamic_.get(), launch_.shared_bytes)) return true;
  return std::any_of(shared_.begin(), shared_.end(), [&](const SharedArray& array) {
    return inside(array.memory.get(), array.bytes);
  });
}

// What is under way is rubbish until the thread that started it has waited.
void Machine::copy_async(void* to, const void* from, const Site& site) {
  if (!is_shared(to, 16)) fail("an asynchronous copy to memory that is not the block's", site);
  Copy copy{to, {}};
  std::memcpy(copy.bytes.data(), from, 16);
  std::memset(to, 0xff, 16);
  threads_[running_].copies.push_back(copy);
}

void Machine::wait_for_copies() {
  for (const Copy& copy : threads_[running_].copies) std::memcpy(copy.to, copy.bytes.data(), 16);
  threads_[running_].copies.clear();
}

void Machine::fail(const std::string& what, const Site& site) {
  const dim3 t = threads_[running_].index;
  throw Error(what + ": thread (" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " +
              std::to_string(t.z) + ") of block " + std::to_string(blockIdx.x) + " at " +
              site.file_name() + ":" + std::to_string(site.line()));
}

std::vector<std::size_t> Machine::visiting_order(std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (schedule().order == Order::reverse) std::reverse(order.begin(), order.end());
  if (schedule().order == Order::shuffled) std::shuffle(order.begin(), order.end(), random_);
  return order;
}

void Machine::start_block() {
  shared_.clear();
  shared_bytes_ = 0;
  dynamic_ = poisoned(launch_.shared_bytes);
  ended_ = waiting_ = 0;
  warps_.assign((threads_.size() + kWarpSize - 1) / kWarpSize, Warp{});
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    threads_[i] = {State::fresh, position(i, launch_.block), nullptr, {}};
    warps_[i / kWarpSize].alive |= 1u << (i % kWarpSize);
  }
}

namespace {

/// The threads of the warps, warp after warp.
std::vector<std::size_t> threads_of(const std::vector<std::size_t>& warps, std::size_t threads) {
  std::vector<std::size_t> all;
  for (const std::size_t warp : warps) {
    const std::size_t first = warp * kWarpSize, end = std::min(first + kWarpSize, threads);
    for (std::size_t thread = first; thread < end; ++thread) all.push_back(thread);
  }
  return all;
}

}  // namespace

// In half of the blocks whose threads are shuffled a warp goes as far as it can before the next.
void Machine::run_block() {
  start_block();
  const bool by_warps = schedule().order == Order::shuffled && random_() % 2 == 0;
  while (ended_ < threads_.size()) {
    bool progress = false;
    order_ = by_warps ? threads_of(visiting_order(warps_.size()), threads_.size())
                      : visiting_order(threads_.size());
    for (next_ = 0; next_ < order_.size();) {
      const std::size_t thread = order_[next_++];
      const State state = threads_[thread].state;
      if (state != State::fresh && state != State::ready) continue;
      progress = true;
      resume(thread);
      if (by_warps) next_ = 0;
    }
    if (waiting_ > 0 && waiting_ == threads_.size()) release_barrier();
    if (!progress) throw Error("deadlock: " + waiting_report());
  }
}

void Machine::resume(std::size_t thread) {
  make_current(thread);
  if (threads_[thread].fiber == nullptr) threads_[thread].fiber = idle_fiber();
  running_fiber_ = threads_[thread].fiber;
  running_fiber_->resume();
  if (!error_) return;
  idle_.clear(), fibers_.clear();  // stacks with abandoned threads on them
  std::rethrow_exception(std::exchange(error_, nullptr));
}

void Machine::make_current(std::size_t thread) {
  running_ = thread;
  threadIdx = threads_[thread].index;
}

Fiber* Machine::idle_fiber() {
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(&Machine::fiber_main));
    return fibers_.back().get();
  }
  Fiber* const fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

void Machine::wait(State state) {
  const std::size_t self = running_;
  threads_[self].state = state;
  threads_[self].fiber = running_fiber_;
  running_fiber_->yield();
}

void Machine::release_barrier() {
  waiting_ = 0;
  for (Thread& thread : threads_) thread.state = State::ready;
}

Machine::Group& Machine::join(Warp& warp, unsigned mask, const Site& site) {
  for (Group& group : warp.groups) {
    if ((group.mask & mask) == 0) continue;
    if (group.mask == mask && same(group.site, site)) return group;
    fail("lanes of one warp meet in different warp functions or masks", site);
  }
  return warp.groups.emplace_back(Group{mask, 0, site});
}

void Machine::resolve(Warp& warp, Group& group, std::size_t first) {
  const unsigned mask = group.mask;
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1u) != 0 && warp.values[lane] != 0) votes |= 1u << lane;
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    const int source = warp.sources[lane];
    warp.results[lane] = {source < 0 ? 0 : warp.values[static_cast<std::size_t>(source)], votes};
    threads_[first + lane].state = State::ready;
  }
  warp.groups.erase(warp.groups.begin() + (&group - warp.groups.data()));
}

void Machine::end_thread() {
  if (!threads_[running_].copies.empty()) {
    fail("a thread ends with asynchronous copies under way", Site::current());
  }
  threads_[running_].state = State::ended;
  ++ended_;
  Warp& warp = warps_[running_ / kWarpSize];
  warp.alive &= ~(1u << (running_ % kWarpSize));
  if (waiting_ > 0) {
    fail("a thread ends while others wait (divergent barrier)", barrier_site_);
  }
  for (const Group& group : warp.groups) {
    if ((group.mask & ~warp.alive) != 0) {
      fail("a lane ends while its warp waits for it", group.site);
    }
  }
}

std::string Machine::waiting_report() const {
  std::array<std::size_t, 5> count{};
  for (const Thread& thread : threads_) ++count[static_cast<std::size_t>(thread.state)];
  return std::to_string(count[2]) + " threads wait at a barrier, " + std::to_string(count[3]) +
         " in a warp function, " + std::to_string(count[4]) + " have ended";
}

// Runs the thread it was resumed for and, as long as none has waited, those after it: threads that
// never wait need no switch.
void Machine::fiber_main() {
  Machine& machine = current();
  Fiber* const fiber = machine.running_fiber_;
  fiber->entered();
  for (;;) {
    try {
      machine.run_threads();
    } catch (...) {
      machine.error_ = std::current_exception();
    }
    machine.idle_.push_back(fiber);
    fiber->yield();
  }
}

void Machine::run_threads() {
  for (;;) {
    kernel_->call(kernel_->parameters.get());
    end_thread();
    if (next_ == order_.size() || threads_[order_[next_]].state != State::fresh) return;
    make_current(order_[next_++]);
  }
}

}  // namespace cairn::simt
