// What a device's memory holds in the course of a step, by category and by operation, and what
// streams and ranks do meanwhile.
//
//   checkpointing::Timeline timeline("plain");
//   precision.backward(nn::cross_entropy(model(x), labels));
//   timeline.count("loss scale", precision.loss_scale());
//   schedule.step(precision.step());
//   checkpointing::write_page("memory.html", {timeline.snapshot()});     // any browser
//   checkpointing::write_trace("trace.json", timeline.snapshot());       // ui.perfetto.dev
//
// A timeline observes the operations of its thread (autograd's observer), the accounts of the
// allocator (core::MemoryStats) and the work of all streams and process groups of the process
// (core::WorkObserver). It resets the device's peak at every beginning and end of an operation, so
// that the peak within each is known: whoever reads peak_total in between reads too little. Times
// are the host's: on a GPU, when work was queued.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/core/memory.h"
#include "cairn/core/work_observer.h"

namespace cairn::checkpointing {

/// What a timeline has seen. Seconds are from its beginning.
struct TimelineRecord {
  struct Operation {
    std::string name;
    autograd::Phase phase = autograd::Phase::forward;
    double begin = 0, end = 0;
  };
  /// Memory at the beginning or the end of an operation.
  struct Sample {
    double seconds = 0;
    std::array<std::size_t, core::kMemoryCategories> bytes{};
    std::size_t total = 0;
    std::size_t peak = 0;  // since the sample before
    std::string during;    // the operation in which that was; empty: none
  };
  struct Count {
    std::string name;
    double seconds = 0, value = 0;
  };
  /// A piece of work of a stream, or a collective (in a stream, or outside of any).
  struct StreamWork {
    std::string name;
    int row = 0;  // of `rows`
    bool collective = false;
    double begin = 0, end = 0;
  };
  std::string name;
  Device device;
  std::vector<Operation> operations;
  std::vector<StreamWork> work;
  std::vector<std::string> rows;  // streams by name, "collectives" for those outside of any
  std::vector<Sample> samples;    // the first as the timeline began
  std::vector<Count> counts;

  double seconds() const { return samples.back().seconds; }
  /// The sample before which the memory was highest; its index. What lay there then is what the
  /// sample before it holds and, beyond that, what the operation itself took.
  std::size_t peak_sample() const;
};

class [[nodiscard]] Timeline : public autograd::ScopedObserver, private core::WorkObserver {
 public:
  explicit Timeline(std::string name, Device device = core::default_device());

  /// A number of the trainer's own, from now on: a loss scale, a step.
  void count(const std::string& name, double value);
  /// All so far; the timeline goes on.
  TimelineRecord snapshot();

 private:
  void on_begin(const autograd::OpEvent& event) override;
  void on_end(const autograd::OpEvent& event) override;
  void ran(const core::ObservedWork& work) override;
  double now() const;
  void sample();

  TimelineRecord record_;
  double began_ = 0;
  std::vector<std::size_t> open_;  // operations that have begun, the innermost last
  std::mutex work_mutex_;
  std::vector<core::ObservedWork> work_;
  core::WorkObservation observation_{*this};  // ends first
};

/// One self-contained HTML page: the first record's memory over time and what its peak holds, and a
/// bar for each record's peak, with its time. Throws core::IoError.
void write_page(const std::string& path, const std::vector<TimelineRecord>& records);
/// The same record as Chrome's trace events: operations by phase, each stream's work and the
/// collectives in it in a row of its own, memory by category, counts.
void write_trace(const std::string& path, const TimelineRecord& record);

}  // namespace cairn::checkpointing
