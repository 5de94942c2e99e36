// Streams, events, graphs, and when work runs.
//
// Work waits in its stream until somebody needs it: a wait of the host runs what comes before the
// point waited for, in random order among streams, and no more (Schedule::late), more now and then
// (shuffled), or all has run when it was queued (early). What nobody waits for runs by itself after
// kGrace, as a GPU's would: another process may wait for it.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gpu/sim/capture.h"
#include "gpu/sim/machine.h"
#include "gpu/sim/memory.h"
#include "gpu/sim/simulator.h"

namespace cairn::gpusim {

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
  bool blocking = false;  // it waits for the default stream, and that one for it
  std::deque<Queued> queue;
  std::uint32_t queued = 0, done = 0;  // numbers of the last work
  Clock clock;                         // after the last queued
  double milliseconds = 0;             // of the work that says how long it takes
  std::uint32_t untold = 0;            // work that does not say
  std::map<std::uint32_t, std::chrono::steady_clock::time_point> ended;  // where an event asks
  std::shared_ptr<Capture> capture;                                      // under way
  std::size_t branch = 0;                                                // of the capture's graph
};

/// A point in a stream; or, where that was captured, in a graph.
struct Event {
  int device = 0;
  bool timed = false, recorded = false;
  Stream* stream = nullptr;
  Point point;
  Clock clock;
  double milliseconds = 0;  // of its stream until then
  std::uint32_t untold = 0;
  std::chrono::steady_clock::time_point since;  // it was recorded
  std::shared_ptr<Capture> capture;
  std::size_t node = 0;
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
  int capability = 90;           // compute capability, times ten
  bool peers = true;             // GPUs can be given access to each other's memory
  std::vector<std::shared_ptr<Capture>> captures;  // under way
  int lost = 0;  // the error that every later call answers, as after a fault of a kernel

  Stream* make_stream(int device);
  /// For a caller of the runtime. The handle of a destroyed stream stands for the next one.
  void* make_handle(Stream& stream);
  void destroy(void* handle);  // what was queued still runs
  Stream* default_stream(int device) { return default_streams_[static_cast<std::size_t>(device)]; }
  Stream* find(void* handle);
  void make_blocking(Stream& stream);
  const std::vector<Stream*>& blocking_streams() const { return blocking_; }
  const std::vector<std::unique_ptr<Stream>>& streams() const { return streams_; }
  Schedule set_schedule(Schedule schedule, std::uint64_t seed);

  void queue(Stream& stream, Work work);
  void record(Event& event, Stream& stream);
  void wait(Stream& stream, const Event& event);
  bool done(const Event& event);
  /// From one to the other, which are done. Where all work between them says how long it takes,
  /// it takes so long: choices by time are the same in each run.
  double milliseconds(const Event& from, const Event& to);
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
  void follow_blocking(Stream& stream, Queued& work);
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
  std::map<const void*, Stream*> handles_;
  std::vector<void*> free_handles_;  // the last one destroyed last
  std::vector<Stream*> default_streams_, blocking_;
  Clock host_;
  std::uint64_t works_run_ = 0;
  bool background_ = false;
};

/// The innermost NVTX range of the calling thread, which is an operation's name; "" outside.
const std::string& current_operation();

}  // namespace cairn::gpusim
