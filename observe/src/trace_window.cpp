#include "trace_window.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "clock.h"
#include "files.h"
#include "writer.h"

namespace cairn::observe {

namespace {

constexpr std::size_t kMostBytes = std::size_t{64} << 20;  // of all ranks together

bool is_operation(core::ObservedWork::Kind kind) {
  return kind != core::ObservedWork::Kind::stream && kind != core::ObservedWork::Kind::collective;
}

}  // namespace

TraceWindow::TraceWindow(Writer& writer, const RunOptions& options)
    : writer_(writer),
      world_(options.world),
      device_(options.device),
      asked_profile_(options.world, writer.folder(), writer.failures_) {}

void TraceWindow::ask(std::int64_t last_told, ProfiledSteps steps) {
  CAIRN_CHECK(last_told < steps.first && steps.first <= steps.last, "observe",
              "expected steps to profile after step ", last_told, ", the first one first, got ",
              steps.first, " to ", steps.last);
  end_request();
  {
    const std::lock_guard lock(mutex_);
    CAIRN_CHECK(state_ == State::none || state_ == State::asked, "observe",
                "expected one profile at a time, got steps ", steps.first, " to ", steps.last,
                " while steps ", steps_.first, " to ", steps_.last, " are profiled");
    state_ = State::asked;
    steps_ = steps;
    request_.reset();
  }
  asked_.store(true, std::memory_order_release);
  begin_or_end(last_told);
}

void TraceWindow::take(const core::ProfileRequest& request, std::int64_t last_told) {
  const auto refuse = [&](const std::string& why) {
    core::answer_profile_request(request.number, /*refused=*/true, why);
  };
  const std::lock_guard lock(mutex_);
  if (state_ != State::none) return refuse(text_of(steps_) + " are to be profiled already");
  if (request.last <= last_told) return refuse(core::str("step ", last_told, " has ended"));
  state_ = State::asked;
  steps_ = {std::max(request.first, last_told + 1), request.last};
  request_ = request;
  asked_.store(true, std::memory_order_release);
}

// The program profiles: what another process asked for ends here.
void TraceWindow::end_request() {
  std::unique_lock lock(mutex_);
  if (!request_) return;
  if (state_ == State::asked) {
    core::answer_profile_request(request_->number, /*refused=*/true, "the program profiles itself");
    state_ = State::none;
  }
  if (state_ != State::open) return;
  state_ = State::ending;
  lock.unlock();
  finish();
}

// Work is shown in the thread that did it, and told in that thread's ring.
void TraceWindow::ran(const core::ObservedWork& work) {
  Ring& ring = writer_.ring();
  {
    Message message(ring);
    message.put(Told::work);
    put_work(message, work);
  }
  if (!is_operation(work.kind)) return;
  RankTrace::Memory memory;
  const core::MemoryStats stats = core::memory_stats(device_);
  std::copy(stats.current.begin(), stats.current.end(), memory.bytes.begin());
  Message(ring).put(Told::memory).put(work.end).put(memory.bytes);
}

void TraceWindow::begin_or_end(std::int64_t step) {
  std::unique_lock lock(mutex_);
  const bool begins = state_ == State::asked && step >= steps_.first - 1;
  const bool ends = state_ == State::open && step >= steps_.last;
  if (ends) state_ = State::ending;
  lock.unlock();
  if (begins) begin();
  if (ends) finish();
}

/// Of a GPU, a window begins and ends where nothing is queued.
void TraceWindow::wait_for_device() const {
  if (device_.is_cuda() && !core::capturing()) core::Stream::current(device_).synchronize();
}

void TraceWindow::begin() {
  wait_for_device();
  core::align_device_time(device_);
  const std::uint64_t dropped = writer_.dropped();
  const std::lock_guard lock(mutex_);
  if (state_ != State::asked) return;  // another thread has just begun
  state_ = State::open;
  dropped_ = dropped;
  left_out_ = 0;
  begin_ = steady_seconds();
  keeps_.store(true, std::memory_order_release);
  observation_.emplace(static_cast<core::WorkObserver&>(*this));
}

TracePart TraceWindow::part_so_far() {
  return {.begin = begin_,
          .end = steady_seconds(),
          .lost = left_out_ + writer_.dropped() - dropped_,
          .marks = {},
          .host = host_name(),
          .messages = std::exchange(messages_, {})};
}

void TraceWindow::finish() {
  std::unique_lock lock(mutex_);
  const auto request = std::exchange(request_, std::nullopt);
  const ProfiledSteps steps = steps_;
  lock.unlock();
  TracePart own = end();
  if (!request) return join(steps, std::move(own));
  lock.lock();
  handed_in_ = {*request, steps, std::move(own)};
}

// Whatever was told by now is in the part.
TracePart TraceWindow::end() {
  observation_.reset();
  wait_for_device();
  const double now = steady_seconds();
  std::unique_lock lock(mutex_);
  state_ = State::draining;
  changed_.wait(lock, [&] { return state_ == State::drained; });
  state_ = State::none;
  asked_.store(false, std::memory_order_relaxed);
  TracePart part = part_so_far();
  part.end = now;
  return part;
}

void TraceWindow::join(ProfiledSteps steps, TracePart own) {
  const std::string what = core::str("the profile of steps ", steps.first, " to ", steps.last);
  if (world_.size > 1) own.marks = mark_rounds(world_, what, steady_seconds);
  std::vector<std::string> parts = world_.exchange(encode(own), what);
  const std::lock_guard lock(mutex_);
  joined_ = std::move(parts);
}

void TraceWindow::keep(std::uint32_t source, std::string_view message) {
  if (!keeps_.load(std::memory_order_acquire)) return;
  const auto told = static_cast<Told>(message.front());
  if (told == Told::summary || told == Told::event || told == Told::wait) return;
  if (messages_.size() + message.size() > kMostBytes / static_cast<std::size_t>(world_.size)) {
    ++left_out_;
    return;
  }
  add_message(messages_, source, message);
}

bool TraceWindow::wanted() {
  const std::lock_guard lock(mutex_);
  return state_ == State::draining;
}

void TraceWindow::turn(bool wanted, bool last) {
  std::vector<std::string> joined;
  std::optional<TracePart> alone;
  std::optional<AskedProfile::HandedIn> asked;
  {
    const std::lock_guard lock(mutex_);
    if (wanted || (last && state_ == State::draining)) {
      keeps_.store(false, std::memory_order_relaxed);
      state_ = State::drained;
      changed_.notify_all();
    }
    joined = std::exchange(joined_, {});
    if (last && state_ == State::open) alone = part_so_far();
    asked = std::exchange(handed_in_, std::nullopt);
    if (alone && request_) asked = {*request_, steps_, *std::exchange(alone, std::nullopt)};
  }
  if (asked) asked_profile_.begin(std::move(*asked));
  asked_profile_.turn(last);
  if (!joined.empty()) asked_profile_.join();  // whose file stands ahead of the next
  std::vector<TracePart> parts;
  parts.reserve(joined.size());
  for (const std::string& part : joined) parts.push_back(decode(part));
  if (!parts.empty()) write(parts);
  if (alone) write({std::move(*alone)});
}

// Of all ranks by rank, or of this one alone.
void TraceWindow::write(const std::vector<TracePart>& parts) {
  const bool alone = parts.size() == 1;
  const std::size_t own = alone ? 0 : static_cast<std::size_t>(world_.rank);
  std::vector<ClockOffset> offsets(1);
  double base = parts[0].begin;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    offsets.push_back(offset_to(parts[0].marks, parts[i].marks));
    base = std::min(base, parts[i].begin + offsets[i].seconds);
  }
  std::vector<RankTrace> ranks;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (own != 0 && i != own) continue;  // rank 0 writes what is of all
    const int rank = alone ? world_.rank : static_cast<int>(i);
    ranks.push_back(read_part(parts[i], rank, world_.size, offsets[i], base));
  }
  const std::string path = writer_.folder() + "/trace.";
  replace_file(path + "json", chrome_trace(ranks.front()), writer_.failures_);
  if (own == 0) replace_file(path + "perfetto-trace", perfetto_trace(ranks), writer_.failures_);
}

}  // namespace cairn::observe
