// Memory whose pages do not move, as a GPU's: blocks are parts of what the system gave at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "allocator.h"
#include "bench/gpt2_blocks.h"
#include "cairn/core/error.h"

namespace cairn::core {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Hands out addresses without memory.
class Addresses final : public SystemMemory {
 public:
  explicit Addresses(std::size_t most = SIZE_MAX) : most_(most) {}

  void* allocate(std::size_t bytes) override {
    if (bytes > most_ - given_) return nullptr;
    ++calls;
    given_ += bytes;
    char* const begin = next_;
    next_ += bytes;  // the next one touches it: nobody may take them for one
    segments[begin] = bytes;
    return begin;
  }
  void release(void* data, std::size_t bytes) noexcept override {
    ++calls;
    given_ -= bytes;
    EXPECT_EQ(segments.at(static_cast<char*>(data)), bytes) << "a part went back";
    segments.erase(static_cast<char*>(data));
  }
  bool gives_segments() const override { return true; }
  bool contains(const char* begin, std::size_t bytes) const {
    auto segment = segments.upper_bound(const_cast<char*>(begin));
    if (segment == segments.begin()) return false;
    --segment;
    return begin + bytes <= segment->first + segment->second;
  }

  int calls = 0;
  std::map<char*, std::size_t> segments;

 private:
  std::size_t most_, given_ = 0;
  char* next_ = reinterpret_cast<char*>(kMiB << 20);
};

class Segments : public testing::Test {
 protected:
  std::shared_ptr<Storage> allocate(std::size_t bytes, void* stream = nullptr) {
    std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator_.allocate(*storage, bytes, MemoryCategory::activations, stream);
    return storage;
  }

  Addresses system_;
  Allocator allocator_{{DeviceType::cuda, 0}, /*pinned=*/false, &system_};
};

TEST_F(Segments, ServeSmallerBlocksAndBecomeWholeAgain) {
  auto whole = allocate(12 * kMiB);
  auto* const begin = static_cast<char*>(whole->data());
  whole = nullptr;
  auto first = allocate(4 * kMiB), second = allocate(4 * kMiB - 100), third = allocate(4 * kMiB);
  EXPECT_EQ(first->data(), begin);
  EXPECT_EQ(second->data(), begin + 4 * kMiB);
  EXPECT_EQ(third->data(), begin + 8 * kMiB);
  first = third = nullptr;
  second = nullptr;
  EXPECT_EQ(allocate(12 * kMiB)->data(), begin);
  EXPECT_EQ(system_.calls, 1);
}

TEST_F(Segments, OfOneAnotherAreNotJoined) {
  auto first = allocate(16 * kMiB), spare = allocate(4 * kMiB);  // the first one's room
  auto second = allocate(16 * kMiB);                             // their neighbour by its address
  second = nullptr, spare = nullptr, first = nullptr;
  const auto larger = allocate(32 * kMiB);
  EXPECT_EQ(system_.calls, 3);
  allocator_.release_cached();
  EXPECT_EQ(system_.segments.size(), 1u);
}

TEST_F(Segments, OfOneStreamServeNoOther) {
  int streams[2];
  allocate(8 * kMiB, &streams[0]);
  const auto other = allocate(4 * kMiB, &streams[1]);
  EXPECT_EQ(system_.calls, 2);
  const auto same = allocate(4 * kMiB, &streams[0]);
  EXPECT_EQ(system_.calls, 2);
}

TEST_F(Segments, GoBackWholeWhereMemoryIsShort) {
  Addresses small(32 * kMiB);
  Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &small);
  const auto take = [&](std::size_t bytes) {
    std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator.allocate(*storage, bytes, MemoryCategory::activations, nullptr);
    return storage;
  };
  take(16 * kMiB);
  auto in_use = take(4 * kMiB);                // cut from it
  EXPECT_THROW(take(24 * kMiB), OutOfMemory);  // its segment is in use
  in_use = nullptr;
  EXPECT_EQ(take(24 * kMiB)->bytes(), 24 * kMiB);
  EXPECT_EQ(small.segments.size(), 1u);
}

TEST_F(Segments, NeverGiveAByteTwice) {
  std::mt19937 random(5);
  const auto below = [&](std::size_t n) { return random() % n; };
  char streams[3];
  std::vector<std::shared_ptr<Storage>> live;
  for (int k = 0; k < 20000; ++k) {
    if (live.size() < 40 && below(5) < 3) {
      const std::size_t bytes = below(4) == 0 ? below(kMiB) + 1 : below(24 * kMiB) + 1;
      live.push_back(allocate(bytes, &streams[below(3)]));
      const auto* begin = static_cast<char*>(live.back()->data());
      ASSERT_TRUE(system_.contains(begin, bytes));
      for (std::size_t i = 0; i + 1 < live.size(); ++i) {
        const auto* other = static_cast<char*>(live[i]->data());
        ASSERT_TRUE(begin + bytes <= other || other + live[i]->bytes() <= begin);
      }
    } else if (!live.empty()) {
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(below(live.size())));
    }
    if (below(2000) == 0) allocator_.release_cached();
  }
  live.clear();
  allocator_.release_cached();
  EXPECT_TRUE(system_.segments.empty());
  EXPECT_EQ(allocator_.stats().reserved, 0u);
}

/// Memory whose system takes its time: it may wait for a device, and that for another thread's.
class Busy final : public SystemMemory {
 public:
  void* allocate(std::size_t bytes) override {
    work();
    return addresses_.allocate(bytes);
  }
  void release(void* data, std::size_t bytes) noexcept override {
    work();
    addresses_.release(data, bytes);
  }
  bool gives_segments() const override { return true; }

  std::function<void()> meanwhile;  // during the next call

 private:
  void work() {
    if (const auto during = std::exchange(meanwhile, nullptr)) during();
  }
  Addresses addresses_;
};

TEST(BusySystem, KeepsNobodyFromBlocksThatThereAre) {
  Busy system;
  Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &system);
  const auto take = [&](std::size_t bytes) {
    std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator.allocate(*storage, bytes, MemoryCategory::activations, nullptr);
    return storage;
  };
  bool served = false;
  std::future<void> other;
  const auto ask_in_another_thread = [&] {
    other = std::async(std::launch::async, [&] { take(1000); });
    served = other.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  };
  take(kMiB);
  system.meanwhile = ask_in_another_thread;
  take(8 * kMiB);
  EXPECT_TRUE(std::exchange(served, false)) << "while memory is made";
  system.meanwhile = ask_in_another_thread;
  allocator.release_cached();
  EXPECT_TRUE(served) << "while memory goes back";
  EXPECT_EQ(allocator.stats().current_total, 0u);
}

/// Least and most tokens of a sequence.
class Lengths : public testing::TestWithParam<std::pair<std::size_t, std::size_t>> {};

// Once lengths have come round, only a step that needs more at once than any before may ask for it.
TEST_P(Lengths, ThatChangeFromStepToStepNeedNothingMoreOfTheSystem) {
  const auto [least, most] = GetParam();
  constexpr int kSteps = 200, kFirst = 20;
  int later = 0, runs_without = 0, runs = 0;
  std::vector<double> reserved;  // over the most that was live
  for (const std::size_t sequences : {4, 16}) {
    for (unsigned seed = 1; seed <= 5; ++seed, ++runs) {
      SCOPED_TRACE(std::to_string(sequences) + " sequences, seed " + std::to_string(seed));
      Addresses system;
      Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &system);
      bench::Gpt2Blocks<std::shared_ptr<Storage>> model([&](std::size_t bytes) {
        std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
        allocator.allocate(*storage, bytes, MemoryCategory::activations, nullptr);
        return storage;
      });
      std::mt19937 random(seed);
      int in_first = 0;
      for (int k = 0; k < kSteps; ++k) {
        const int before = system.calls;
        const std::size_t peak = allocator.stats().peak_total;
        model.step(sequences * (least + random() % (most + 1 - least)));
        if (k < kFirst) in_first = system.calls;
        const bool asks = k >= kFirst && system.calls > before;
        EXPECT_TRUE(!asks || allocator.stats().peak_total > peak) << "step " << k;
      }
      EXPECT_LE(system.calls, 50);
      later += system.calls - in_first;
      runs_without += system.calls == in_first ? 1 : 0;
      const MemoryStats stats = allocator.stats();
      reserved.push_back(static_cast<double>(stats.reserved) /
                         static_cast<double>(stats.peak_total));
      EXPECT_LE(reserved.back(), 1.15);
      EXPECT_TRUE(sequences != 4 || system.calls == in_first);
    }
  }
  EXPECT_LE(later, 8);  // of 1,800 steps, all in one run
  EXPECT_GE(runs_without, runs - 1);
  std::sort(reserved.begin(), reserved.end());
  EXPECT_LE(reserved[reserved.size() / 2], 1.12);
}

INSTANTIATE_TEST_SUITE_P(Of, Lengths,
                         testing::Values(std::pair<std::size_t, std::size_t>{512, 1024},
                                         std::pair<std::size_t, std::size_t>{16, 1024}),
                         [](const auto& info) { return std::to_string(info.param.first); });

// Where the system has no room for what is spare, it is asked for what is needed.
TEST(SpareMemory, IsNotInsistedOn) {
  Addresses small(18 * kMiB);
  Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &small);
  std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
  allocator.allocate(*storage, 18 * kMiB, MemoryCategory::activations, nullptr);
  EXPECT_EQ(small.calls, 1);
  EXPECT_EQ(allocator.stats().reserved, 18 * kMiB);
}

TEST(SpareMemory, TakesNoOthersBlocksFromThem) {
  Addresses small(42 * kMiB);
  Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &small);
  int streams[2];
  const auto take = [&](std::size_t bytes, int stream) {
    std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator.allocate(*storage, bytes, MemoryCategory::activations, &streams[stream]);
    return storage;
  };
  take(20 * kMiB, 0);
  const auto other = take(18 * kMiB, 1);  // there is room for it, and none to spare
  EXPECT_EQ(small.calls, 2);
  EXPECT_EQ(small.segments.size(), 2u);
}

TEST(SpareMemory, IsWithinTheCapacityAndTheBound) {
  for (const bool capacity : {true, false}) {
    Addresses system;
    Allocator allocator({DeviceType::cuda, 0}, /*pinned=*/false, &system);
    capacity ? allocator.set_capacity(41 * kMiB) : allocator.set_cache_bound(41 * kMiB);
    std::shared_ptr<Storage> two[2];
    for (auto& storage : two) {
      storage = Storage::wrap(nullptr, 0, {}, nullptr);
      allocator.allocate(*storage, 18 * kMiB, MemoryCategory::activations, nullptr);
    }
    EXPECT_EQ(allocator.stats().reserved, 40 * kMiB) << capacity;  // 22, and 18
  }
}

}  // namespace
}  // namespace cairn::core
