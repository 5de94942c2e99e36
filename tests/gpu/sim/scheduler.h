// Streams, events, graphs, and when work runs.
//
// Work waits in its stream until somebody needs it: a wait of the host runs what comes before the
// point waited for, in random order among streams, and no more (Schedule::late), more now and then
// (shuffled), or all has run when it was queued (early). What nobody waits for runs by itself after
// kGrace, as a GPU's would: another process may wait for it.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/sim/machine.h"
#include "gpu/sim/memory.h"
#include "gpu/sim/simulator.h"

namespace cairn::gpusim {

struct Graph;

struct Queued {
  Work work;
  Point point;
  Clock clock;               // what is known to be done when it runs
  std::vector<Point> after;  // of other streams
  std::chrono::steady_clock::time_point since;
};

struct Stream {
  std::uint32_t id = 0;
  int device = 0;
  std::string name;
  bool destroyed = false;
  std::deque<Queued> queue;
  std::uint32_t queued = 0, done = 0;  // numbers of the last work
  Clock clock;                         // after the last queued
  double milliseconds = 0;             // of all its work
  Graph* capture = nullptr;
};

/// A point in a stream; or, while its stream is captured, in a graph.
struct Event {
  int device = 0;
  bool timed = false, recorded = false;
  Stream* stream = nullptr;
  Point point;
  Clock clock;
  double milliseconds = 0;  // of its stream until then
  Graph* capture = nullptr;
};

struct Graph {
  Stream* origin = nullptr;
  bool broken = false;
  std::vector<Work> work;
};

struct Fault {
  std::string call;
  std::uint64_t first;  // number of the call, counted from the process's start
  bool and_later;
  int code;
};

class Machine {
 public:
  static Machine& get();

  std::mutex mutex;
  Memory memory;
  Counters counters;
  std::vector<Fault> faults;
  std::optional<std::vector<TracedWork>> trace;
  int gpus = 1;
  std::size_t shared_limit = 0;  // shared memory that a block may ask for
  int captures = 0;              // under way
  int lost = 0;  // the error that every later call answers, as after a fault of a kernel

  Stream* make_stream(int device);
  Stream* default_stream(int device) { return default_streams_[static_cast<std::size_t>(device)]; }
  Stream* find(void* handle);
  Schedule set_schedule(Schedule schedule, std::uint64_t seed);

  void queue(Stream& stream, Work work);
  void record(Event& event, Stream& stream);
  void wait(Stream& stream, const Event& event);
  void end_capture(const Graph& graph);
  bool done(const Event& event);
  bool idle(Stream& stream);

  // The host waits, and knows then of what was done. Runs what must be done before, and no more.
  void finish(Stream& stream);
  void finish(const Event& event);
  void finish_device(int device);
  /// What is due, and by the schedule maybe more.
  void progress();

 private:
  friend void background();
  Machine();
  void finish(const std::vector<std::pair<Stream*, std::uint32_t>>& points);
  bool can_run(Stream& stream);
  void run_first(Stream& stream);
  bool run_one(const std::vector<std::uint32_t>& needed);
  std::vector<std::uint32_t> needed_for(
      const std::vector<std::pair<Stream*, std::uint32_t>>& points) const;
  void run_overdue();
  void start_background();

  Schedule schedule_ = Schedule::late;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Stream>> streams_;  // by id
  std::set<const void*> handles_;
  std::vector<Stream*> default_streams_;
  Clock host_;
  std::uint64_t works_run_ = 0;
  bool background_ = false;
};

/// The innermost NVTX range of the calling thread, which is an operation's name; "" outside.
const std::string& current_operation();

}  // namespace cairn::gpusim
