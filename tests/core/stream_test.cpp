#include "cairn/core/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/core/work_observer.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Device kHost{DeviceType::cpu, 0};

TEST(Stream, DefaultRunsInline) {
  const Stream stream = Stream::default_stream(kHost);
  std::thread::id ran;
  stream.submit([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_TRUE(stream.is_inline());
  EXPECT_EQ(stream.native(), nullptr);
  EXPECT_THROW(stream.submit([] { fail("work", "broken"); }), InvalidArgument);
}

TEST(Stream, WorkerKeepsOrder) {
  const Stream stream = Stream::create(kHost);
  std::vector<int> order;
  std::thread::id worker;
  for (int i = 0; i < 100; ++i) stream.submit([&order, i] { order.push_back(i); });
  stream.submit([&] { worker = std::this_thread::get_id(); });
  stream.synchronize();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  EXPECT_NE(worker, std::this_thread::get_id());
  EXPECT_TRUE(stream.idle());
}

TEST(Stream, WorkSeesItsOwnStreamAndNestsInline) {
  const Stream stream = Stream::create(kHost);
  std::vector<int> order;
  bool own = false;
  stream.submit([&] {
    own = Stream::current(kHost) == stream;
    stream.submit([&] { order.push_back(1); });
    stream.synchronize();
    order.push_back(2);
  });
  stream.synchronize();
  EXPECT_TRUE(own);
  EXPECT_THAT(order, ElementsAre(1, 2));
}

class Pieces : public WorkObserver {
 public:
  std::vector<std::string> streams;
  void ran(const ObservedWork& work) override { streams.push_back(work.name); }
};

TEST(Stream, WorkWithinWorkIsAPartOfItToObservers) {
  const Device device = default_device();
  const Stream outer = Stream::create(device, "outer"), inner = Stream::create(device, "inner");
  Pieces pieces;
  const WorkObservation observation(pieces);
  outer.submit([&] {
    outer.submit([] {});
    inner.submit([] {});
    inner.synchronize();
  });
  outer.submit([] {});
  outer.synchronize();
  EXPECT_THAT(pieces.streams, ElementsAre("inner", "outer", "outer"));
}

TEST(Stream, GuardSetsTheThreadsStream) {
  const Stream stream = Stream::create(kHost);
  {
    const StreamGuard outer(stream);
    EXPECT_EQ(Stream::current(kHost), stream);
    {
      const StreamGuard inner(Stream::default_stream(kHost));
      EXPECT_TRUE(Stream::current(kHost).is_inline());
    }
    EXPECT_EQ(Stream::current(kHost), stream);
    EXPECT_TRUE(Stream::current({DeviceType::cpu, 1}).is_inline());
  }
  EXPECT_TRUE(Stream::current(kHost).is_inline());
}

TEST(Stream, EventsOrderStreams) {
  const Stream first = Stream::create(kHost, "first");
  const Stream second = Stream::create(kHost, "second");
  std::atomic<bool> go = false;
  int value = 0;
  Event ready(kHost);
  EXPECT_TRUE(ready.done());
  first.submit([&] {
    while (!go) std::this_thread::yield();
    value = 1;
  });
  ready.record(first);
  EXPECT_FALSE(ready.done());
  second.wait(ready);
  second.submit([&] { value *= 10; });
  go = true;
  second.synchronize();
  EXPECT_EQ(value, 10);
  EXPECT_TRUE(ready.done());
}

TEST(Stream, InlineStreamWaitsForAWorker) {
  const Stream worker = Stream::create(kHost);
  int value = 0;
  worker.submit([&] { value = 5; });
  Event done(kHost);
  done.record(worker);
  Stream::default_stream(kHost).wait(done);
  EXPECT_EQ(value, 5);
}

TEST(Stream, RecordingAgainLeavesEarlierWaitsAlone) {
  const Stream a = Stream::create(kHost);
  const Stream b = Stream::create(kHost);
  std::atomic<bool> go = false;
  Event event(kHost);
  event.record(a);
  b.wait(event);
  a.submit([&] {
    while (!go) std::this_thread::yield();
  });
  event.record(a);
  b.synchronize();  // waits for the first recording only
  EXPECT_FALSE(event.done());
  go = true;
  event.synchronize();
  EXPECT_TRUE(event.done());
}

TEST(Stream, ErrorIsRethrownOnceAndDropsLaterWork) {
  const Stream stream = Stream::create(kHost);
  bool ran = false;
  stream.submit([] { fail<CommunicationError>("all_reduce", "rank 1 is gone"); });
  stream.submit([&] { ran = true; });
  EXPECT_THAT(test::message_of<CommunicationError>([&] { stream.synchronize(); }),
              HasSubstr("rank 1 is gone"));
  EXPECT_FALSE(ran);
  EXPECT_NO_THROW(stream.synchronize());
  stream.submit([&] { ran = true; });
  stream.synchronize();
  EXPECT_TRUE(ran);
}

TEST(Stream, ErrorReachesWhoWaitsForTheEvent) {
  const Stream stream = Stream::create(kHost);
  Event event(kHost);
  stream.submit([] { fail<DeviceError>("kernel", "failed"); });
  event.record(stream);
  EXPECT_THROW(event.synchronize(), DeviceError);
  EXPECT_NO_THROW(event.synchronize());
  EXPECT_NO_THROW(stream.synchronize());

  stream.submit([] { fail<DeviceError>("kernel", "failed again"); });
  event.record(stream);
  EXPECT_THROW(Stream::default_stream(kHost).wait(event), DeviceError);
}

TEST(Stream, ErrorPassesToDependentStreams) {
  const Stream source = Stream::create(kHost);
  const Stream dependent = Stream::create(kHost);
  bool ran = false;
  Event event(kHost);
  source.submit([] { fail<DeviceError>("kernel", "failed"); });
  event.record(source);
  dependent.wait(event);
  dependent.submit([&] { ran = true; });
  EXPECT_THROW(dependent.synchronize(), DeviceError);
  EXPECT_FALSE(ran);
  EXPECT_THROW(source.synchronize(), DeviceError);
}

TEST(Stream, LastHandleMayDieInItsOwnWork) {
  std::atomic<bool> done = false;
  {
    auto stream = std::make_shared<Stream>(Stream::create(kHost));
    stream->submit([copy = *stream, &done] { done = true; });
  }
  while (!done) std::this_thread::yield();
}

TEST(Stream, EndsAfterItsWork) {
  int count = 0;
  {
    const Stream stream = Stream::create(kHost);
    for (int i = 0; i < 50; ++i) stream.submit([&] { ++count; });
  }
  EXPECT_EQ(count, 50);
}

TEST(Stream, CopiesQueueOnTheCurrentStream) {
  const Stream stream = Stream::create(kHost);
  std::atomic<bool> go = false;
  const Tensor x = Tensor::full({4}, 3);
  const Tensor y = Tensor::zeros({4});
  stream.submit([&] {
    while (!go) std::this_thread::yield();
  });
  const StreamGuard guard(stream);
  copy_bytes(x, y);
  EXPECT_FALSE(stream.idle());
  go = true;
  EXPECT_THAT(y.to_vector(), ElementsAre(3, 3, 3, 3));  // to_vector waits
}

TEST(Stream, OnlyCudaStreamsAreWrapped) {
  EXPECT_THROW(Stream::wrap(kHost, nullptr), InvalidArgument);
}

class StreamOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU";
    foreign = std::make_unique<Stream>(Stream::create(gpu));  // as if another library had made it
  }
  void TearDown() override { follow_current_stream(nullptr); }

  static thread_local void* others_current;  // of the other library
  const Device gpu{DeviceType::cuda, 0};
  std::unique_ptr<Stream> foreign;
};
thread_local void* StreamOnCuda::others_current = nullptr;

TEST_F(StreamOnCuda, WrapsAStreamOfAnotherLibrary) {
  const Stream wrapped = Stream::wrap(gpu, foreign->native());
  EXPECT_EQ(wrapped.native(), foreign->native());
  EXPECT_TRUE(wrapped == Stream::wrap(gpu, foreign->native()));
  EXPECT_FALSE(wrapped == Stream::default_stream(gpu));
  EXPECT_TRUE(Stream::wrap(gpu, nullptr) == Stream::default_stream(gpu));
  EXPECT_THROW(Stream::wrap({DeviceType::cuda, 99}, foreign->native()), InvalidArgument);
}

TEST_F(StreamOnCuda, FollowsTheCurrentStreamOfAnotherLibrary) {
  follow_current_stream([](int) { return others_current; });
  EXPECT_TRUE(Stream::current(gpu) == Stream::default_stream(gpu));
  others_current = foreign->native();
  EXPECT_EQ(Stream::current(gpu).native(), foreign->native());
  EXPECT_EQ(Stream::current(kHost).native(), nullptr);
  const Stream own = Stream::create(gpu);
  {
    const StreamGuard guard(own);
    EXPECT_TRUE(Stream::current(gpu) == own);
  }
  std::thread([&] { EXPECT_TRUE(Stream::current(gpu) == Stream::default_stream(gpu)); }).join();
  follow_current_stream(nullptr);
  EXPECT_TRUE(Stream::current(gpu) == Stream::default_stream(gpu));
}

// No event orders the two: only one stream does. The simulated machine names a race otherwise.
TEST_F(StreamOnCuda, WorkOfBothLibrariesIsInOneOrder) {
  const Tensor x = Tensor::full({1000}, 1.0, DType::f32, gpu), y = Tensor::empty_like(x);
  const Tensor seven = Tensor::full({1000}, 7.0, DType::f32, gpu);
  Stream::default_stream(gpu).synchronize();
  {
    const StreamGuard theirs(*foreign);
    copy_bytes(seven, x);
  }
  others_current = foreign->native();
  follow_current_stream([](int) { return others_current; });
  copy_bytes(x, y);
  EXPECT_THAT(y.to_vector(), testing::Each(7));
}

TEST(Stream, EventsBelongToADevice) {
  Event event(kHost);
  EXPECT_THROW(event.record(Stream::default_stream({DeviceType::cpu, 1})), InvalidArgument);
  EXPECT_THROW(Stream::create({DeviceType::cpu, 9}), InvalidArgument);
}

}  // namespace
}  // namespace cairn::core
