#include "gpu/sim/scheduler.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "gpu/sim/settings.h"

namespace cairn::gpusim {
namespace {

using Time = std::chrono::steady_clock;
constexpr auto kGrace = std::chrono::milliseconds(20);
constexpr auto kTick = std::chrono::milliseconds(5);

thread_local bool runs_work = false;

// The emulator's findings are exceptions.
void run(const Work& work) try {
  runs_work = true;
  work.run();
  runs_work = false;
} catch (const std::exception& e) {
  report("kernel", e.what());
}

}  // namespace

bool inside_work() {
  return runs_work;
}
const std::string& running_name() {
  return *Machine::get().memory.running().name;
}

// Runs overdue work; nobody else may be there to do it.
void background() {
  Machine& machine = Machine::get();
  for (;;) {
    std::this_thread::sleep_for(kTick);
    const std::lock_guard lock(machine.mutex);
    machine.run_overdue();
    machine.memory.close_all();
  }
}

Machine& Machine::get() {
  static auto& machine = *new Machine;  // never destroyed: work may be under way at the exit
  return machine;
}

Machine::Machine() {
  const Settings settings = settings_from_environment();
  gpus = settings.gpus;
  faults = settings.faults;
  set_schedule(settings.schedule, settings.seed);
  memory.start(gpus, settings.memory);
  shared_limit = settings.shared;
  capability = settings.capability;
  peers = settings.peers;
  for (int device = 0; device < gpus; ++device) default_streams_.push_back(make_stream(device));
}

Schedule Machine::set_schedule(Schedule schedule, std::uint64_t seed) {
  random_.seed(seed);
  return std::exchange(schedule_, schedule);
}

Stream* Machine::make_stream(int device) {
  auto stream = std::make_unique<Stream>();
  stream->id = static_cast<std::uint32_t>(streams_.size());
  stream->device = device;
  stream->name = "stream " + std::to_string(stream->id);
  return streams_.emplace_back(std::move(stream)).get();
}

void* Machine::make_handle(Stream& stream) {
  void* handle = &stream;
  if (!free_handles_.empty()) {
    handle = free_handles_.back();
    free_handles_.pop_back();
  }
  handles_[handle] = &stream;
  return handle;
}

void Machine::destroy(void* handle) {
  Stream& stream = *handles_.at(handle);
  if (stream.blocking) {  // the default stream still comes after its work
    queue(*default_stream(stream.device), {"wait", [] {}});
    std::erase(blocking_, &stream);
  }
  handles_.erase(handle);
  free_handles_.push_back(handle);
}

Stream* Machine::find(void* handle) {
  if (handle == nullptr) return default_stream(current_device());
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

void Machine::make_blocking(Stream& stream) {
  stream.blocking = true;
  blocking_.push_back(&stream);
}

// The default stream comes after all that blocking streams have, and they after it.
void Machine::follow_blocking(Stream& stream, Queued& work) {
  const auto follow = [&](const Stream& other) {
    if (other.queued == 0) return;
    work.after.push_back({other.id, other.queued});
    work.clock.learn(other.clock);
  };
  const Stream& main = *default_stream(stream.device);
  if (stream.blocking) follow(main);
  if (&stream != &main) return;
  for (const Stream* other : blocking_) {
    if (other->device == stream.device) follow(*other);
  }
}

void Machine::queue(Stream& stream, Work work) {
  if (stream.capture) return stream.capture->add(stream.branch, std::move(work));
  start_background();
  stream.clock.learn(host_);
  stream.milliseconds += work.milliseconds.value_or(0);
  stream.untold += work.milliseconds ? 0 : 1;
  const Point point{stream.id, stream.queued + 1};
  Queued queued{std::move(work), point, stream.clock, {}, Time::now()};
  follow_blocking(stream, queued);
  if (trace) trace->push_back({queued.work.name, point, queued.clock});
  stream.queued = point.number;
  stream.clock = queued.clock;
  stream.clock.learn(point);
  stream.queue.push_back(std::move(queued));
  progress();
}

void Machine::record(Event& event, Stream& stream) {
  const bool follows = !blocking_.empty() && &stream == default_stream(stream.device);
  if (follows && !stream.capture) queue(stream, {"record", [] {}});
  event.recorded = true;
  event.stream = &stream;
  event.capture = stream.capture;
  event.node = stream.capture ? stream.capture->last[stream.branch] : 0;
  event.point = {stream.id, stream.queued};
  event.clock = stream.clock;
  event.milliseconds = stream.milliseconds;
  event.untold = stream.untold;
  event.since = Time::now();
  if (event.timed && stream.done < stream.queued) stream.ended[stream.queued];
}

double Machine::milliseconds(const Event& from, const Event& to) {
  const bool told =
      from.stream == to.stream && from.untold == to.untold && from.point.number < to.point.number;
  if (told) return to.milliseconds - from.milliseconds;
  const auto reached = [](const Event& event) {
    const auto ended = event.stream->ended.find(event.point.number);
    return ended == event.stream->ended.end() ? event.since : std::max(event.since, ended->second);
  };
  return std::chrono::duration<double, std::milli>(reached(to) - reached(from)).count();
}

// An empty work of the waiting stream that runs after the event's.
void Machine::wait(Stream& stream, const Event& event) {
  if (!event.recorded) return;
  stream.clock.learn(host_);
  stream.clock.learn(event.clock);
  ++stream.untold;
  const Point point{stream.id, ++stream.queued};
  stream.queue.push_back({{"wait", [] {}}, point, stream.clock, {event.point}, Time::now()});
  stream.clock.learn(point);
  progress();
}

// A host that has seen the event done knows what came before it.
bool Machine::done(const Event& event) {
  if (!event.recorded) return true;
  if (event.stream->done < event.point.number) return false;
  host_.learn(event.clock);
  return true;
}

bool Machine::idle(Stream& stream) {
  if (!stream.queue.empty()) return false;
  host_.learn(stream.clock);
  return true;
}

bool Machine::can_run(Stream& stream) {
  if (stream.queue.empty()) return false;
  Queued& first = stream.queue.front();
  for (const Point& point : first.after) {
    if (streams_[point.stream]->done < point.number) return false;
  }
  if (!first.work.ready) return true;
  const auto name = std::make_shared<const std::string>(first.work.name);
  memory.begin({++works_run_, stream.device, first.point, &first.clock, name});
  runs_work = true;
  const bool ready = first.work.ready();
  runs_work = false;
  memory.end();
  return ready;
}

void Machine::run_first(Stream& stream) {
  const Queued first = std::move(stream.queue.front());
  stream.queue.pop_front();
  const auto name = std::make_shared<const std::string>(first.work.name);
  memory.begin({++works_run_, stream.device, first.point, &first.clock, name});
  if (lost == 0) run(first.work);
  memory.end();
  stream.done = first.point.number;
  const auto asked = stream.ended.find(stream.done);
  if (asked != stream.ended.end()) asked->second = Time::now();
}

/// One work among those needed (by stream id, up to which number) that can run.
bool Machine::run_one(const std::vector<std::uint32_t>& needed) {
  std::vector<Stream*> able;
  for (std::size_t id = 0; id < needed.size(); ++id) {
    Stream& stream = *streams_[id];
    if (stream.done < needed[id] && can_run(stream)) able.push_back(&stream);
  }
  if (able.empty()) return false;
  run_first(*able[random_() % able.size()]);
  return true;
}

std::vector<std::uint32_t> Machine::needed_for(
    const std::vector<std::pair<Stream*, std::uint32_t>>& points) const {
  std::vector<std::uint32_t> needed(streams_.size(), 0);
  std::vector<Point> open;
  const auto need = [&](Point point) {
    if (needed[point.stream] >= point.number) return;
    open.push_back(point);
  };
  for (const auto& [stream, number] : points) need({stream->id, number});
  while (!open.empty()) {
    const Point point = open.back();
    open.pop_back();
    const std::uint32_t before =
        std::exchange(needed[point.stream], std::max(needed[point.stream], point.number));
    for (const Queued& queued : streams_[point.stream]->queue) {
      if (queued.point.number <= before || queued.point.number > point.number) continue;
      for (const Point& other : queued.after) need(other);
    }
  }
  return needed;
}

void Machine::finish(const std::vector<std::pair<Stream*, std::uint32_t>>& points) {
  const auto reached = [&] {
    for (const auto& [stream, number] : points) {
      if (stream->done < number) return false;
    }
    return true;
  };
  while (!reached()) {
    if (!run_one(needed_for(points))) wait_a_little();
  }
}

void Machine::finish(Stream& stream) {
  const Clock clock = stream.clock;
  finish({{&stream, stream.queued}});
  host_.learn(clock);
}

void Machine::finish(const Event& event) {
  if (!event.recorded) return;
  finish({{event.stream, event.point.number}});
  host_.learn(event.clock);
}

void Machine::finish_device(int device) {
  std::vector<std::pair<Stream*, std::uint32_t>> points;
  Clock clock;
  for (const auto& stream : streams_) {
    if (stream->device != device) continue;
    points.push_back({stream.get(), stream->queued});
    clock.learn(stream->clock);
  }
  finish(points);
  host_.learn(clock);
}

void Machine::progress() {
  const std::vector<std::uint32_t> all(streams_.size(), UINT32_MAX);
  if (schedule_ == Schedule::late) return;
  if (schedule_ == Schedule::shuffled) {
    if (random_() % 4 == 0) run_one(all);
    return;
  }
  while (run_one(all)) {
  }
}

void Machine::run_overdue() {
  if (trace) return;
  const auto now = Time::now();
  for (bool ran = true; ran;) {
    ran = false;
    for (const auto& stream : streams_) {
      if (stream->queue.empty() || now - stream->queue.front().since < kGrace) continue;
      if (!can_run(*stream)) continue;
      run_first(*stream);
      ran = true;
    }
  }
}

void Machine::start_background() {
  if (std::exchange(background_, true)) return;
  std::thread(background).detach();
  // A child of fork has no such thread, and must not find the lock taken.
  pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                 [] { get().background_ = false, get().mutex.unlock(); });
}

}  // namespace cairn::gpusim
