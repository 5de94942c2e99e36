// A run that tells how it goes: its numbers step by step, what befell it, and where its time and
// memory went, in files that a browser, TensorBoard, Prometheus and scripts open.
//
//   observe::Run run("runs/mnist", {.world = ddp.world()});
//   for (const data::Batch& batch : loader) {
//     train_step(batch);
//     run.step({{"loss", loss.item()}, {"lr", optimizer.lr()}});
//   }
//
// In the folder (of ranks other than 0 in its folder rank-N):
//   report.html                one page: curves, time, memory, ranks, skips, events; an open page
//                              follows
//   metrics.jsonl              a JSON object a step, an event, and the summary
//   metrics.csv                a line a step
//   metrics.prom               OpenMetrics, of the last step
//   events.out.tfevents.*      TensorBoard's
//   memory_snapshot.pickle     memory_viz's, where RunOptions::memory_events asks for it
//   trace.perfetto-trace       steps that were profiled, of all ranks, for ui.perfetto.dev
//   trace.json                 of this rank, as Chrome's events
//
// What is told goes into a ring of the calling thread (kRingBytes, made when a thread first tells
// something) without locks or allocations; a thread of the run empties the rings 20 times a second
// and writes. Where a ring is full, what does not fit is dropped, and the page and
// metrics.prom say how much was. The run's memory is bounded: at most kMostNames curves of at most
// kMostPoints points, however long it lasts; so are the files.
//
// A disk that is full, or fails, does not end a training: the run warns once, goes on, tries
// again, and its end says what is missing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cairn/core/device.h"
#include "cairn/core/device_time.h"
#include "cairn/core/memory_trace.h"
#include "cairn/core/tensor.h"
#include "cairn/core/world.h"

namespace cairn::observe {

inline constexpr std::size_t kRingBytes = std::size_t{1} << 18;  // a thread's
inline constexpr std::size_t kMostNames = 128;    // of values; later ones stand in no curve
inline constexpr std::size_t kMostPoints = 2000;  // a curve's: lowest and highest of steps together

/// A number of a step, by name. The page knows "loss", "accuracy", "lr", "loss_scale",
/// "gradient_norm", "machine_share" (of what the machine could compute, 0 to 1) and names that end
/// with "_per_second"; any other has a curve of its own. Ahead of a '/' stands what belongs
/// together. A name must not be empty, nor be "step", "time" or "event", nor begin with "seconds/"
/// or "memory/", which the run adds itself.
struct Value {
  template <class T>
  requires std::is_arithmetic_v<T> Value(std::string_view name_, T value_)
      : name(name_), value(static_cast<double>(value_)) {}
  std::string_view name;
  double value;
};

enum class EventKind : std::uint8_t {
  skip,        // the step under way updated nothing
  overflow,    // a gradient of the step under way was not finite
  restart,     // the run went on from a checkpoint
  checkpoint,  // one was saved
  note
};
inline constexpr int kEventKinds = 5;
std::string_view name(EventKind kind);

/// From the first to the last, both too.
struct ProfiledSteps {
  std::int64_t first = 0, last = 0;
};

struct RunOptions {
  World world;  // of it: rank and size, and what joins the ranks' traces
  /// The step that the run goes on from. What the folder holds up to it is kept, what came later
  /// goes. 0: a run that stands in the folder is overwritten.
  std::int64_t first_step = 0;
  Device device = core::default_device();  // whose memory is told, and whose time if it is a GPU
  /// Run::profile, of those after first_step.
  std::optional<ProfiledSteps> profile = {};
  /// Run::histograms counts in each step that is a multiple of it. 0: in none.
  std::int64_t histogram_every = 0;
  /// Lines of the page's table, and TensorBoard's hyperparameters: {"opt level", "O2"}. The run
  /// adds command, machine and versions to the former.
  std::vector<std::pair<std::string, std::string>> about;
  /// report.html and metrics.prom are written anew at most so often, and so seldom that this takes
  /// less than 1/500 of the time.
  double renew_seconds = 5;
  /// metrics.jsonl and metrics.csv are begun anew at this size, and the former becomes NAME.1;
  /// of TensorBoard's files the last two stay.
  std::size_t log_bytes = std::size_t{64} << 20;
  /// Where Prometheus may ask for the metrics: "127.0.0.1:9464", rank r at a port higher by r; port
  /// 0: any that is free. Beyond the loopback interface only with a token in CAIRN_OBSERVE_TOKEN,
  /// of 16 characters or more, which each request must bring. Empty: nowhere.
  std::string serve;
  /// memory_snapshot.pickle has so many of the device's last allocations and frees, of some 100
  /// bytes each, beside what the device holds. It is written where a request is refused
  /// (OutOfMemory), and at the end of a run in which none was. 0: there is none.
  std::size_t memory_events = 0;
};

class Writer;

class Run {
 public:
  /// Makes the folder. Throws core::IoError where it cannot be made or written, or the address
  /// cannot be served.
  explicit Run(const std::string& folder, RunOptions options = {});
  /// Writes what is left, as std::exit does for the runs that live.
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// The values of one more step. With them go "seconds/step", the time since the last call in this
  /// thread, "seconds/NAME" of each Span that ended in this thread since, without the spans within
  /// it, of several ranks "seconds/wait", what this thread waited for others (core::WaitMark),
  /// which is in no span, and, some ten times a second, "memory/CATEGORY" (bytes): the highest seen
  /// since. Values may be NaN. Any thread may call, one at a time.
  void step(std::initializer_list<Value> values) { step(last_step() + 1, values); }
  /// The same where steps are counted elsewhere, or not each is told. Throws InvalidArgument unless
  /// steps rise.
  void step(std::int64_t step, std::initializer_list<Value> values) {
    this->step(step, std::span<const Value>(values.begin(), values.size()));
  }
  void step(std::int64_t step, std::span<const Value> values);
  /// The step that was told last; before that, first_step.
  std::int64_t last_step() const { return last_step_.load(std::memory_order_relaxed); }

  /// Numbers of the whole run: a test accuracy.
  void summary(std::initializer_list<Value> values) {
    summary(std::span<const Value>(values.begin(), values.size()));
  }
  void summary(std::span<const Value> values);

  /// A skip or overflow belongs to the step after the last that was told, any other event to that
  /// one, unless `step` (not below 0) says where. `culprit`: the parameter. Of texts, the first
  /// 4,096 bytes are kept.
  void event(EventKind kind, std::string_view text, std::string_view culprit = {},
             std::int64_t step = -1);

  /// Traces these steps: spans, the operations, updates, streams and collectives of the process
  /// (core::WorkObserver), memory at each operation's end, and what steps tell. A step is what lies
  /// between two calls of step(). Every rank of the world asks for the same steps and tells them:
  /// within step(last_step) the ranks compare their clocks and join what each has, in collectives
  /// over RunOptions::world. A trace stands in place of the one before; where 64 MiB of all ranks
  /// are full, its end is missing, and it says how much. A run that ends before `last_step` leaves
  /// what each rank has, in its own folder. Any thread may call. `cairn-run profile` asks for the
  /// same from outside; what it asked for ends where this is called. Throws InvalidArgument unless
  /// last_step() < first_step <= last_step, or while steps are being profiled.
  void profile(std::int64_t first_step, std::int64_t last_step);

  /// How the values and the gradients of these parameters are distributed, in the step under way if
  /// it is one of RunOptions::histogram_every; else this does nothing. For between a backward and
  /// the update, which clears gradients. TensorBoard has "weights/NAME" and "gradients/NAME"; the
  /// page has the last of each, and how often the largest gradient could double, as it lies with
  /// its loss scale, before it is beyond its dtype. Copies one tensor after another to the host.
  /// Gradients are unscaled. Where ranks reduce them, all ranks call: it waits for that; where they
  /// divide gradients or weights (ZeRO), each tells its part.
  void histograms(std::span<const NamedTensor> parameters);

  /// Pictures at the last step that was told: [H, W], [C, H, W] or, beside each other,
  /// [N, C, H, W], of one channel or three, u8, or floating from 0 (black) to 1, beyond which they
  /// are cut. TensorBoard has all, the page the last of each of the first 16 names. Copied to the
  /// host and encoded here. Throws InvalidArgument for other shapes and dtypes, and where all
  /// together are more than 2,048 pixels wide or high.
  void image(std::string_view name, const Tensor& pixels);

  /// A text at the last step that was told, as it stands, in lines: a table. TensorBoard has all,
  /// the page the last of each of the first 16 names. Of a text, the first 256 KiB are kept.
  ///
  ///   run.text("precision of operations", explain.report().table());         // amp::Explain
  ///   if (anomaly.first()) run.text("anomaly", anomaly.first()->describe());  // amp::AnomalyMode
  void text(std::string_view name, std::string_view text);

  /// Where the files are.
  const std::string& folder() const;
  /// Where metrics are served: "127.0.0.1:9464"; empty: nowhere.
  std::string served_at() const;

 private:
  friend class Span;
  friend std::vector<std::string> advice(Run& run);
  void tell_stream_waits(std::uint32_t depth);
  std::unique_ptr<Writer> writer_;
  std::int64_t histogram_every_;
  std::atomic<std::int64_t> last_step_;
};

/// What would make the run faster: at most three sentences, each with the share of the time that it
/// is expected to save ("data: 31 % of the step waits for batches; ..."). Computed from what was
/// told so far; none before step 20. The page has them too.
std::vector<std::string> advice(Run& run);

/// A part of a step: from here to the end of the scope. Spans of one name in a step are added up;
/// of spans within others each has its own time alone. Of a run on a GPU it is the GPU's time: from
/// when the thread's current stream has done what was queued before the span to when it has done
/// what the span queued.
///
///   observe::Span part(run, "forward");
///   const Tensor loss = nn::cross_entropy(model(images), labels);
///   part.next("backward");
///   precision.backward(loss);
class [[nodiscard]] Span {
 public:
  /// The name is read when the span ends.
  Span(Run& run, std::string_view name) : Span(&run, name) {}
  /// Null: nothing is told.
  Span(Run* run, std::string_view name);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// Ends the part, and begins another. Of the spans of its thread this must be the innermost.
  void next(std::string_view name);

 private:
  friend class Run;
  static std::uint32_t depth_in(const Run* run);  // of a span that would begin here
  void begin(std::string_view name);
  void end();
  Run* run_;
  std::string_view name_;
  double begin_ = 0, waited_ = 0;
  core::TimeMark began_;
  std::uint32_t depth_ = 0;  // so many spans of the run are around it
  Span* outer_ = nullptr;
  std::optional<core::MemoryLabel> label_;
};

}  // namespace cairn::observe
