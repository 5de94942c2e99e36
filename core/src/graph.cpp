#include "cairn/core/graph.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "allocator.h"
#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/tensor.h"
#include "capture.h"
#include "cuda_interface.h"

namespace cairn::core {

namespace {

thread_local const Capture* current = nullptr;

/// What is queued on `later` from now on runs after what `earlier` has so far.
void follow(const Stream& later, const Stream& earlier) {
  Event point(earlier.device());
  point.record(earlier);
  later.wait(point);
}

/// Makes a graph's stream the current one, in the order of the one that was.
class OwnStream {
 public:
  explicit OwnStream(const Stream& own)
      : own_(own), outside_(Stream::current(own.device())), guard_(own) {
    follow(own_, outside_);
  }
  ~OwnStream() {
    try {
      follow(outside_, own_);
    } catch (const std::exception& e) {  // a lost device: the next call reports it
      log::error("[graph] {}", e.what());
    }
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  Stream own_, outside_;
  StreamGuard guard_;
};

}  // namespace

const Capture* current_capture() {
  return current;
}

bool is_recorded(const Stream& stream) {
  if (!stream.device().is_cuda()) return false;
  return capturing() || (stream.native() != nullptr && cuda::is_captured(stream.native()));
}

bool capturing() {
  return current != nullptr;
}

std::uint64_t capture_number() {
  return current == nullptr ? 0 : current->number;
}

void at_each_replay(ReplayHook hook) {
  CAIRN_CHECK(capturing(), "graph", "expected a graph that is recorded, got none");
  current->hooks->push_back(std::move(hook));
}

std::vector<TensorView> broken_in_replays() {
  std::vector<TensorView> all;
  if (!capturing()) return all;
  for (const ReplayHook& hook : *current->hooks) {
    if (hook.broken.defined()) all.push_back(hook.broken);
  }
  return all;
}

void refuse_in_capture(const char* where, const char* what) {
  if (!capturing()) return;
  fail<Unsupported>(where, "expected work that a graph can repeat, got ", what,
                    " (leave it out of the captured step, or do not capture it)");
}

struct Graph::Impl {
  Device device;
  Stream stream;
  Event replayed;
  Tensor random;            // i64: seed, offset
  std::uint64_t draws = 0;  // of one replay
  void* executable = nullptr;
  std::vector<ReplayHook> hooks;

  explicit Impl(Device d) : device(d), stream(Stream::create(d, "graph")), replayed(d) {
    allocator_of(device).retain(stream.native());
    const StreamGuard guard(stream);
    random = Tensor::empty({2}, DType::i64, device);
  }
  ~Impl() {
    drop();
    random = Tensor();
    allocator_of(device).release(stream.native());
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void drop() {
    if (executable == nullptr) return;
    replayed.synchronize();
    cuda::destroy_graph(std::exchange(executable, nullptr));
    hooks.clear();  // they keep what the graph uses
  }
  void record(const std::function<void()>& work);
  void write_random(const Stream& on);
};

/// The host runs the work with what it draws counted from 0.
void Graph::Impl::record(const std::function<void()>& work) {
  static std::atomic<std::uint64_t> captures = 0;
  Generator& generator = Generator::current();
  std::vector<ReplayHook> wanted;
  const Capture capture{stream.native(), static_cast<const std::uint64_t*>(random.raw_data()),
                        generator, &wanted, ++captures};
  cuda::begin_capture(stream.native());
  current = &capture;
  try {
    work();
  } catch (...) {
    current = nullptr;
    cuda::drop_capture(stream.native());
    generator = capture.before;
    throw;
  }
  current = nullptr;
  draws = generator.offset() - capture.before.offset();
  generator = capture.before;
  executable = cuda::end_capture(stream.native());
  hooks = std::move(wanted);
}

void Graph::Impl::write_random(const Stream& on) {
  const std::uint64_t words[] = {Generator::current().seed(), Generator::current().offset()};
  const auto staging = Storage::allocate_pinned(sizeof(words));
  std::memcpy(staging->data(), words, sizeof(words));
  cuda::copy(random.raw_data(), device, staging->data(), Device{}, sizeof(words), on.native());
  staging->record_use(on);
}

Graph::Graph(Device device) {
  if (!device.is_cuda()) {
    fail<Unsupported>("graph", "expected a CUDA device, got ", device,
                      " (its work runs when it is queued: call it again)");
  }
  impl_ = std::make_unique<Impl>(device);
}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

void Graph::warm_up(const std::function<void()>& work) {
  refuse_in_capture("graph", "the warm-up of another graph");
  const DeviceGuard device(impl_->device);
  const OwnStream own(impl_->stream);
  work();
}

void Graph::capture(const std::function<void()>& work) {
  refuse_in_capture("graph", "the capture of another graph");
  const DeviceGuard device(impl_->device);
  impl_->drop();
  const OwnStream own(impl_->stream);
  impl_->record(work);
}

bool Graph::captured() const {
  return impl_->executable != nullptr;
}

void Graph::follow_last_replay() const {
  const DeviceGuard device(impl_->device);
  Stream::current(impl_->device).wait(impl_->replayed);
}

void Graph::replay() {
  CAIRN_CHECK(captured(), "graph", "expected a captured graph to replay, got one without work");
  refuse_in_capture("graph", "the replay of another graph");
  const DeviceGuard device(impl_->device);
  const Stream stream = Stream::current(impl_->device);
  for (const ReplayHook& hook : impl_->hooks) {
    if (hook.before) hook.before(stream);
  }
  stream.wait(impl_->replayed);
  if (impl_->draws > 0) {
    impl_->write_random(stream);
    Generator& generator = Generator::current();
    generator.set(generator.seed(), generator.offset() + impl_->draws);
  }
  cuda::launch_graph(impl_->executable, stream.native());
  impl_->replayed.record(stream);
  for (const ReplayHook& hook : impl_->hooks) {
    if (hook.after) hook.after(stream);
  }
}

}  // namespace cairn::core
