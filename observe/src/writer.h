// The thread of a run that empties the rings and writes the files.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/status.h"
#include "cairn/observe/run.h"
#include "csv_log.h"
#include "event_log.h"
#include "files.h"
#include "histogram.h"
#include "history.h"
#include "image.h"
#include "json_log.h"
#include "memory_recorder.h"
#include "metrics_server.h"
#include "open_metrics.h"
#include "records.h"
#include "ring.h"
#include "trace_window.h"

namespace cairn::observe {

/// How a message begins; its fields follow. Times stand first, and then the marks that have a GPU's
/// in their place once it has passed them.
enum class Told : std::uint8_t {
  step,     // seconds, mark, step, what the thread has waited for ranks, values
  summary,  // seconds, values
  event,    // seconds, step, kind, text, culprit
  span,     // begin, end, marks, what it waited for ranks, how many spans are around it, name
  wait,     // 0, 0, marks, how many spans are around it: of a GPU's stream for ranks
  work,     // of the process, while it is profiled: put_work
  memory    // seconds, bytes by category, while it is profiled
};

NamedValues take_values(MessageReader& reader);
std::string host_name();  // with the process's number

/// What is told seldom, in no ring.
using Record = std::variant<LayerRecord, ImageRecord, TextRecord>;

class Writer {
 public:
  Writer(const std::string& folder, RunOptions options);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  /// The calling thread's, made at its first call.
  Ring& ring();
  const std::string& folder() const { return folder_; }
  std::string served_at() const { return server_ ? server_->address() : ""; }
  Device device() const { return options_.device; }
  TraceWindow& trace() { return trace_; }
  /// Of the calling thread, for ranks; of a GPU its streams wait.
  double waited() const { return device().is_cpu() ? core::waited_for_ranks() : 0; }
  std::uint64_t dropped();  // messages that found no room
  void add(Record record);
  /// Of all that was told before the call.
  std::vector<std::string> advice();
  /// Writes what is left; nothing is told any more.
  void end();

 private:
  friend class TraceWindow;
  struct Source {
    std::shared_ptr<Ring> ring;
    std::uint32_t number = 0;
    std::vector<char> unread;
    NamedValues parts;                 // seconds of spans since its last step
    std::vector<double> inner;         // seconds in spans and waits that so many spans are around
    double last_step = 0, waited = 0;  // at its last step
    double stream_waited = 0;          // since
  };

  Ring& new_ring();
  void run();
  void turn(bool last, bool asked);
  void answer();
  void empty_rings(std::optional<double> deadline);
  void read(Source& source, std::optional<double> deadline);
  void decode(Source& source, MessageReader& reader);
  void take_step(Source& source, MessageReader& reader);
  void take_span(Source& source, MessageReader& reader);
  void take_wait(Source& source, MessageReader& reader);
  void take_summary(MessageReader& reader);
  void take_event(MessageReader& reader);
  void tell(const EventRecord& event);
  void add_memory(NamedValues& values);
  void sample_memory(double now);
  void sample_temperature(double now);
  RunFacts facts(bool running);
  void serve();
  std::string metrics_now();
  void hand_out_metrics();
  void take_records();
  void renew(bool running);
  double unix_of(double steady) const { return steady + unix_offset_; }

  RunOptions options_;
  std::string folder_;
  const std::uint64_t id_;
  const double started_, unix_offset_, restarts_;
  Failures failures_;
  History history_;
  JsonLog json_;
  CsvLog csv_;
  EventLog events_;
  MemoryRecorder recorder_;
  std::optional<core::MemoryStats> memory_;  // the highest since the last step
  double sampled_ = 0, temperature_sampled_ = 0, renew_at_ = 0;
  TraceWindow trace_{*this, options_};

  std::mutex rings_mutex_;
  std::vector<Source> sources_;
  std::uint32_t next_source_ = 0;
  std::uint64_t dropped_ = 0;  // by threads that have ended

  std::mutex mutex_;
  std::condition_variable wake_, answered_;
  bool ending_ = false;
  std::vector<Record> records_;  // not yet written
  std::size_t record_bytes_ = 0;
  bool asked_for_advice_ = false;
  std::vector<std::string> advice_;
  bool asked_for_metrics_ = false;  // by the server's thread
  std::string metrics_;
  std::condition_variable metrics_made_;
  std::optional<MetricsServer> server_;
  std::thread thread_;
};

}  // namespace cairn::observe
