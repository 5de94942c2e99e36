// What an allocator tells of itself, replayed: the memory that it has, and who has which part.
#include "cairn/core/memory_trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "allocator.h"
#include "cairn/core/error.h"
#include "cairn/core/pickle.h"
#include "cairn/core/stream.h"

namespace cairn::core {
namespace {

using Action = MemoryEvent::Action;
using Extents = std::map<std::uint64_t, std::uint64_t>;  // bytes by address

/// Segments and blocks after the events; complains of what cannot be.
class Replay {
 public:
  explicit Replay(const MemoryTrace& before) {
    for (const MemorySegment& segment : before.segments) segments[segment.address] = segment.bytes;
  }
  void take(const MemoryEvent& event) {
    switch (event.action) {
      case Action::take_segment:
        EXPECT_TRUE(segments.emplace(event.address, event.bytes).second);
        break;
      case Action::give_segment:
        ASSERT_TRUE(segments.contains(event.address));
        EXPECT_EQ(segments[event.address], event.bytes);
        segments.erase(event.address);
        break;
      case Action::allocate:
        EXPECT_TRUE(is_inside(event));
        EXPECT_TRUE(blocks.emplace(event.address, event.bytes).second);
        by_category[event.category] += event.bytes;
        break;
      case Action::request_free:
        EXPECT_EQ(blocks[event.address], event.bytes);
        by_category[event.category] -= event.bytes;
        break;
      case Action::free:
        EXPECT_EQ(blocks.erase(event.address), 1u);
        break;
      case Action::out_of_memory:
        break;
    }
  }
  bool is_inside(const MemoryEvent& event) const {
    auto segment = segments.upper_bound(event.address);
    if (segment == segments.begin()) return false;
    --segment;
    return event.address + event.bytes <= segment->first + segment->second;
  }

  Extents segments, blocks;
  std::map<MemoryCategory, std::uint64_t> by_category;
};

Extents extents(const std::vector<MemorySegment>& segments) {
  Extents all;
  for (const MemorySegment& segment : segments) {
    all[segment.address] = segment.bytes;
    std::uint64_t next = segment.address;
    for (const MemorySegment::Block& block : segment.blocks) {
      EXPECT_EQ(block.address, next);
      next += block.bytes;
    }
    EXPECT_EQ(next, segment.address + segment.bytes);
  }
  return all;
}

std::size_t total(const Extents& extents) {
  std::size_t bytes = 0;
  for (const auto& [address, size] : extents) bytes += size;
  return bytes;
}

/// Allocates and frees sizes of all kinds; what stays is kept.
template <class Allocate>
std::vector<std::shared_ptr<Storage>> random_life(Allocate allocate) {
  std::mt19937 random(7);
  std::vector<std::shared_ptr<Storage>> live;
  for (int i = 0; i < 400; ++i) {
    const bool frees = !live.empty() && random() % 2 == 0;
    if (frees) {
      const auto which = static_cast<std::ptrdiff_t>(random() % live.size());
      live.erase(live.begin() + which);
      continue;
    }
    const std::size_t bytes = std::size_t{1} << (random() % 24);
    live.push_back(allocate(bytes + random() % bytes, static_cast<MemoryCategory>(random() % 7)));
  }
  return live;
}

void expect_replayed(const MemoryTrace& before, const MemoryTrace& trace, const MemoryStats& base,
                     const MemoryStats& stats) {
  EXPECT_EQ(trace.dropped, 0u);
  Replay replay(before);
  for (const MemoryEvent& event : trace.events) replay.take(event);
  EXPECT_EQ(replay.segments, extents(trace.segments));
  EXPECT_EQ(total(replay.segments), stats.reserved);
  for (int i = 0; i < kMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    EXPECT_EQ(replay.by_category[category], stats.of(category) - base.of(category));
  }
  Extents live;
  for (const MemorySegment& segment : trace.segments) {
    for (const MemorySegment::Block& block : segment.blocks) {
      if (block.state == MemorySegment::Block::State::live) live[block.address] = block.requested;
    }
  }
  for (const auto& [address, bytes] : replay.blocks) EXPECT_EQ(live[address], bytes);
}

TEST(MemoryTrace, TellsOfHostMemoryThatIsCutAndJoined) {
  const Device device{};
  release_cached_memory(device);
  trace_memory(device, 100'000);
  const MemoryTrace before = memory_trace(device);
  const MemoryStats base = memory_stats(device);
  auto live = random_life([&](std::size_t bytes, MemoryCategory category) {
    const MemoryCategoryGuard guard(category);
    return Storage::allocate(bytes, device);
  });
  live[0]->set_category(MemoryCategory::communication);
  expect_replayed(before, memory_trace(device), base, memory_stats(device));
  release_cached_memory(device);
  expect_replayed(before, memory_trace(device), base, memory_stats(device));
  trace_memory(device, 0);
  live.clear();
  EXPECT_TRUE(memory_trace(device).events.empty());
}

/// Hands out addresses without memory.
class TracedAddresses final : public SystemMemory {
 public:
  void* allocate(std::size_t bytes) override {
    next_ += bytes;
    return next_ - bytes;
  }
  void release(void* /*data*/, std::size_t /*bytes*/) noexcept override {}
  bool gives_segments() const override { return true; }

 private:
  char* next_ = reinterpret_cast<char*>(std::size_t{1} << 40);
};

TEST(MemoryTrace, TellsOfSegmentsAndTheirParts) {
  TracedAddresses system;
  Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &system);
  allocator.trace(100'000);
  auto live = random_life([&](std::size_t bytes, MemoryCategory category) {
    auto storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator.allocate(*storage, bytes, category, nullptr);
    return storage;
  });
  expect_replayed({}, allocator.trace(), {}, allocator.stats());
  live.clear();
  allocator.release_cached();
  expect_replayed({}, allocator.trace(), {}, allocator.stats());
  EXPECT_TRUE(allocator.trace().segments.empty());
}

// Of queued work that may still use it: the block is the stream's until the work is done.
TEST(MemoryTrace, ABlockThatAStreamUsesLeavesLater) {
  const Device device{};
  const Stream stream = Stream::create(device, "traced");
  trace_memory(device, 100);
  std::promise<void> go;
  auto storage = Storage::allocate(1000, device);
  storage->record_use(stream);
  stream.submit([&go] { go.get_future().wait(); });
  storage = nullptr;
  const auto has_free = [&] {
    const auto events = memory_trace(device).events;
    return std::any_of(events.begin(), events.end(),
                       [](const MemoryEvent& event) { return event.action == Action::free; });
  };
  EXPECT_EQ(memory_trace(device).events.back().action, Action::request_free);
  EXPECT_FALSE(has_free());
  go.set_value();
  stream.synchronize();
  (void)Storage::allocate(10, device);
  EXPECT_TRUE(has_free());
  trace_memory(device, 0);
}

TEST(MemoryTrace, ObserversHearOfRequestsThatAreRefused) {
  const Device device{};
  const std::size_t capacity = memory_capacity(device);
  std::vector<Device> heard;
  {
    const OutOfMemoryObservation observation([&](Device where) { heard.push_back(where); });
    set_memory_capacity(device, memory_stats(device).current_total + 100);
    EXPECT_THROW((void)Storage::allocate(1000, device), OutOfMemory);
  }
  EXPECT_THROW((void)Storage::allocate(1000, device), OutOfMemory);
  set_memory_capacity(device, capacity);
  EXPECT_EQ(heard, std::vector<Device>{device});
}

TEST(MemoryTrace, AnEventHasTheInnermostAndTheOutermostLabelOfItsTime) {
  const Device device{};
  trace_memory(device, 100);
  const auto labels_of_the_last = [&] {
    (void)Storage::allocate(1000, device);
    const std::vector<MemoryEvent> events = memory_trace(device).events;
    const auto last = std::find_if(events.rbegin(), events.rend(), [](const MemoryEvent& event) {
      return event.action == Action::allocate;
    });
    return std::pair(std::string(last->labels[0].data()), std::string(last->labels[1].data()));
  };
  using Pair = std::pair<std::string, std::string>;
  {
    const MemoryLabel step("step"), part("part"), operation("matmul");
    EXPECT_EQ(labels_of_the_last(), Pair("matmul", "step"));
  }
  {
    const MemoryLabel alone("alone");
    EXPECT_EQ(labels_of_the_last(), Pair("alone", ""));
  }
  EXPECT_EQ(labels_of_the_last(), Pair("", ""));
  trace_memory(device, 0);
}

TEST(MemoryTrace, KeepsAtMostTenMillionEvents) {
  EXPECT_THROW(trace_memory(Device{}, 10'000'001), InvalidArgument);
}

// Python's own writer's bytes for these values, but for the memo's places.
TEST(Pickle, TextsThatComeAgainAreWrittenOnce) {
  PickleWriter writer;
  writer.long_list();
  writer.key("ab"), writer.item();
  writer.key("ab"), writer.item();
  writer.none(), writer.item();
  writer.boolean(true), writer.item();
  writer.integer(std::int64_t{1} << 40), writer.item();
  const std::string expected(
      "\x80\x02]X\x02\0\0\0abr\0\0\0\0aj\0\0\0\0aNa\x88"
      "a\x8a\x08\0\0\0\0\0\x01\0\0a.",
      38);
  EXPECT_EQ(writer.finish(), expected);
}

}  // namespace
}  // namespace cairn::core
