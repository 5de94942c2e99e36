#include "cairn/core/graph.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/core/tensor.h"
#include "capture.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using testing::HasSubstr;

TEST(Graphs, AreRefusedOnTheCpu) {
  EXPECT_THAT(message_of<Unsupported>([] { Graph graph(Device{}); }),
              HasSubstr("[graph] expected a CUDA device, got cpu:0"));
  EXPECT_FALSE(capturing());
}

TEST(Graphs, ADrawOutsideOfACaptureIsTheNextNumber) {
  Generator a(3), b(3);
  for (int k = 0; k < 3; ++k) {
    const RandomDraw draw = a.draw().resolved();
    EXPECT_EQ(draw.seed, 3u);
    EXPECT_EQ(draw.offset, b.next());
  }
  const std::uint64_t base[] = {11, 100};
  const RandomDraw replayed = RandomDraw{0, 5, base}.resolved();
  EXPECT_EQ(replayed.seed, 11u);
  EXPECT_EQ(replayed.offset, 105u);
}

class GraphsOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
  }
  const Device device{DeviceType::cuda, 0};
  Tensor numbers(double value) const { return Tensor::full({1000}, value, DType::f32, device); }
  /// Reserved after all was given back that can be.
  std::size_t reserved() const {
    release_cached_memory(device);
    return memory_stats(device).reserved;
  }
  static void expect_all(const Tensor& x, double value) {
    EXPECT_THAT(x.to_vector<double>(), testing::Each(value));
  }
};

TEST_F(GraphsOnCuda, ReplayOnTheCurrentStreamWhatWasRecorded) {
  const Tensor from = numbers(1), to = numbers(0);
  Graph graph(device);
  const auto work = [&] {
    const Tensor scratch = Tensor::empty_like(from);
    copy_bytes(from, scratch);
    copy_bytes(scratch, to);
  };
  EXPECT_FALSE(graph.captured());
  EXPECT_THROW(graph.replay(), InvalidArgument);
  graph.warm_up(work);
  expect_all(to, 1);
  copy_bytes(numbers(2), from);
  graph.capture(work);
  expect_all(to, 1);  // nothing ran
  graph.replay();
  expect_all(to, 2);
  const Stream other = Stream::create(device);
  other.submit([&] {
    copy_bytes(numbers(3), from);
    graph.replay();
  });
  other.synchronize();
  expect_all(to, 3);
}

TEST_F(GraphsOnCuda, KeepTheirMemoryUntilTheyEnd) {
  const Tensor from = numbers(1), to = numbers(0);
  const std::size_t before = reserved();
  {
    Graph graph(device);
    const auto work = [&] {
      const Tensor scratch = Tensor::empty_like(from);
      copy_bytes(from, scratch);
      copy_bytes(scratch, to);
    };
    graph.warm_up(work);
    graph.capture(work);
    EXPECT_GE(reserved(), before + 4000);
    std::vector<Tensor> others;
    for (int k = 0; k < 20; ++k) others.push_back(numbers(9));
    graph.replay();
    for (const Tensor& other : others) expect_all(other, 9);
    expect_all(to, 1);
  }
  EXPECT_EQ(reserved(), before);
}

// Another stream has used the block: nobody may ask in a capture whether that is done.
TEST_F(GraphsOnCuda, KeepAlsoWhatIsFreedWhileTheyAreCaptured) {
  const Tensor to = numbers(0);
  const Stream other = Stream::create(device);
  const std::size_t live = memory_stats(device).current_total;
  {
    Graph graph(device);
    Tensor from = numbers(1);
    from.storage()->record_use(other);
    graph.capture([&] {
      copy_bytes(from, to);
      from = Tensor();
    });
    EXPECT_LT(memory_stats(device).current_total, live + 4000);
    EXPECT_THAT(memory_report(device), HasSubstr("cuda:0"));
    std::vector<Tensor> others;
    for (int k = 0; k < 20; ++k) others.push_back(numbers(9));
    graph.replay();
    expect_all(to, 1);
    for (const Tensor& one : others) expect_all(one, 9);
  }
  EXPECT_EQ(memory_stats(device).current_total, live);
}

// One branch of the graph reads a block that another frees, and may get again.
TEST_F(GraphsOnCuda, HandOutNoBlockThatAnotherBranchUses) {
  const Tensor from = numbers(1), others = numbers(2), to = numbers(0), kept = numbers(0);
  const Stream branch = Stream::create(device);
  Graph graph(device);
  const auto follow = [&](const Stream& later, const Stream& earlier) {
    Event point(device);
    point.record(earlier);
    later.wait(point);
  };
  const auto work = [&] {
    const Stream own = Stream::current(device);
    Tensor scratch = Tensor::empty_like(from);
    copy_bytes(from, scratch);
    follow(branch, own);
    {
      const StreamGuard guard(branch);
      copy_bytes(scratch, to);
    }
    scratch.storage()->record_use(branch);
    scratch = Tensor();
    const Tensor next = Tensor::empty_like(from);
    copy_bytes(others, next);
    copy_bytes(next, kept);
    follow(own, branch);
  };
  graph.warm_up([&] {  // enough of them, however late the device is
    const Tensor blocks[] = {Tensor::empty_like(from), Tensor::empty_like(from),
                             Tensor::empty_like(from), Tensor::empty_like(from)};
  });
  graph.warm_up(work);
  graph.capture(work);
  for (int k = 0; k < 3; ++k) graph.replay();
  expect_all(to, 1);
  expect_all(kept, 2);
}

// Another thread frees what the graph's stream has used: nobody may ask that stream meanwhile.
TEST_F(GraphsOnCuda, AreNotBrokenByWhatOtherThreadsFree) {
  const Tensor from = numbers(1), to = numbers(0);
  Tensor used = numbers(3);
  Graph graph(device);
  graph.warm_up([&] {
    copy_bytes(used, to);
    used.storage()->record_use(Stream::current(device));
  });
  const void* const block = used.raw_data();
  graph.capture([&] {
    std::thread([&] { used = Tensor(); }).join();
    copy_bytes(from, to);
  });
  graph.replay();
  expect_all(to, 1);
  std::vector<Tensor> next;
  while (next.size() < 100 && (next.empty() || next.back().raw_data() != block)) {
    next.push_back(numbers(9));
  }
  EXPECT_EQ(next.back().raw_data(), block);
}

// A copy's staging memory goes back although a graph is recorded.
TEST_F(GraphsOnCuda, KeepNoPinnedMemoryThatIsFreedMeanwhile) {
  const Tensor from = numbers(1), to = numbers(0);
  const Stream other = Stream::create(device);
  auto staging = Storage::allocate_pinned(4000);
  const void* const block = staging->data();
  staging->record_use(other);
  Graph graph(device);
  graph.capture([&] {
    staging = nullptr;
    copy_bytes(from, to);
  });
  EXPECT_EQ(Storage::allocate_pinned(4000)->data(), block);
}

// What a replay asks of the host comes before and after it, and ends with the graph.
TEST_F(GraphsOnCuda, HaveHooksOfTheirReplays) {
  const Tensor x = numbers(1), y = numbers(0);
  std::string calls;
  const auto alive = std::make_shared<int>(0);
  bool fails = false;
  {
    Graph graph(device);
    const auto work = [&] {
      copy_bytes(x, y);
      if (!capturing()) return;
      EXPECT_NE(capture_number(), 0u);
      at_each_replay({.before = [&, alive](const Stream&) {
        if (fails) throw InvalidArgument("no");
        calls += "a";
      }});
      EXPECT_TRUE(broken_in_replays().empty());
      at_each_replay({.broken = x,
                      .before = [&](const Stream&) { calls += "b"; },
                      .after = [&](const Stream&) { calls += "c"; }});
      EXPECT_EQ(broken_in_replays().size(), 1u);
    };
    graph.warm_up(work);
    graph.capture(work);
    EXPECT_EQ(calls, "");
    for (int k = 0; k < 2; ++k) graph.replay();
    EXPECT_EQ(calls, "abcabc");
    copy_bytes(numbers(5), x);
    fails = true;
    EXPECT_THROW(graph.replay(), InvalidArgument);
    expect_all(y, 1);
  }
  EXPECT_EQ(alive.use_count(), 1);
  EXPECT_EQ(capture_number(), 0u);
  EXPECT_THROW(at_each_replay({}), InvalidArgument);
}

TEST_F(GraphsOnCuda, GiveBackThePartsOfSegmentsThatTheyFreed) {
  if (std::getenv("CAIRN_SEGMENTS") != std::string("1")) GTEST_SKIP() << "Cuda.graphs has segments";
  const std::size_t before = reserved();
  constexpr std::int64_t kHalf = std::int64_t{1} << 20;
  const auto make = [&](std::int64_t n) { return Tensor::empty({n}, DType::f32, device); };
  make(2 * kHalf);
  const std::size_t segment = memory_stats(device).reserved;
  EXPECT_GE(segment, before + 8 * kHalf);
  Tensor first = make(kHalf), second = make(kHalf);
  EXPECT_EQ(memory_stats(device).reserved, segment);  // the two of one segment
  {
    Graph graph(device);
    graph.capture([&] { first = Tensor(); });
    EXPECT_GE(reserved(), segment);
  }
  second = Tensor();
  EXPECT_EQ(reserved(), before);
}

TEST_F(GraphsOnCuda, RefuseWhatNeedsTheHost) {
  const Tensor x = numbers(1);
  Graph graph(device);
  const auto refused = [&](const std::function<void()>& work) {
    graph.warm_up(work);
    const std::string message = message_of<Unsupported>([&] { graph.capture(work); });
    EXPECT_FALSE(graph.captured());
    EXPECT_FALSE(capturing());
    expect_all(x, 1);  // the device goes on
    return message;
  };
  EXPECT_THAT(refused([&] { Tensor::full({1}, 2.0, DType::f32, device).item(); }),
              HasSubstr("[copy] expected work that a graph can repeat, got a copy between the host "
                        "and a GPU"));
  EXPECT_THAT(refused([&] { Stream::current(device).synchronize(); }),
              HasSubstr("[stream] expected work that a graph can repeat, got a wait"));
  EXPECT_THAT(refused([] { Generator::current().next(); }), HasSubstr("[random] expected"));
  EXPECT_THAT(refused([] { Storage::allocate_pinned(10); }), HasSubstr("[allocate] expected"));
  const Stream worker = Stream::create(Device());
  EXPECT_THAT(
      refused([&] { worker.submit([] {}); }),
      HasSubstr("[stream] expected work that a graph can repeat, got work of another thread "
                "of the host"));
  std::vector<Tensor> kept;
  const auto keep = [&] { kept.push_back(Tensor::empty({1 << 20}, DType::f32, device)); };
  EXPECT_THAT(refused(keep), HasSubstr("[capture] expected memory that a warm-up has left, got a "
                                       "request for 4.00 MiB"));
  Graph inner(device);
  EXPECT_THAT(refused([&] {
                if (capturing()) inner.capture([] {});
              }),
              HasSubstr("got the capture of another graph"));
}

TEST_F(GraphsOnCuda, ReplaysDrawWhatTheWorkWould) {
  manual_seed(5);
  const Tensor x = numbers(1);
  Graph graph(device);
  std::uint64_t drawn = 0;
  const auto work = [&] {
    for (int k = 0; k < 3; ++k) drawn = Generator::current().draw().offset;
  };
  graph.warm_up(work);
  EXPECT_EQ(drawn, 2u);
  EXPECT_EQ(Generator::current().offset(), 3u);
  graph.capture(work);
  EXPECT_EQ(drawn, 2u);  // counted from the step's first
  EXPECT_EQ(Generator::current().offset(), 3u);
  graph.replay();
  graph.replay();
  EXPECT_EQ(Generator::current().offset(), 9u);
  expect_all(x, 1);
}

TEST_F(GraphsOnCuda, ReplaysOnTwoStreamsFollowEachOther) {
  const Tensor from = numbers(1), to = numbers(0);
  Graph graph(device);
  const auto work = [&] { copy_bytes(from, to); };
  graph.warm_up(work);
  graph.capture(work);
  Stream::current(device).synchronize();
  const Stream streams[] = {Stream::create(device), Stream::create(device)};
  for (const Stream& stream : streams) stream.submit([&] { graph.replay(); });
  for (const Stream& stream : streams) stream.synchronize();
  expect_all(to, 1);
}

// The host writes the seed of the second while the device has not read that of the first.
TEST_F(GraphsOnCuda, ReplaysInARowHaveASeedEach) {
  manual_seed(5);
  const Tensor last = Tensor::zeros({2}, DType::i64, device);
  const Tensor before = Tensor::zeros({2}, DType::i64, device);
  Graph graph(device);
  const auto work = [&] {
    Generator::current().draw();
    copy_bytes(last, before);
    if (!capturing()) return copy_bytes(before, last);
    const auto* const base = current_capture()->random_base;  // on the device: seed, offset
    const TensorView words(const_cast<std::uint64_t*>(base), {2}, DType::i64, device);
    copy_bytes(words, last.view());
  };
  graph.warm_up(work);
  graph.capture(work);
  Stream::current(device).synchronize();
  graph.replay();
  graph.replay();
  EXPECT_EQ(before.to_vector<std::int64_t>(), (std::vector<std::int64_t>{5, 1}));
  EXPECT_EQ(last.to_vector<std::int64_t>(), (std::vector<std::int64_t>{5, 2}));
}

}  // namespace
}  // namespace cairn::core
