#include "cairn/observe/run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>

#include "cairn/core/error.h"
#include "cairn/core/gradient_slot.h"
#include "cairn/core/memory_trace.h"
#include "cairn/core/status.h"
#include "cairn/core/stream.h"
#include "clock.h"
#include "histogram.h"
#include "image.h"
#include "ring.h"
#include "writer.h"

namespace cairn::observe {

namespace {

thread_local Span* innermost = nullptr;

void check_names(std::span<const Value> values) {
  for (const auto& [name, value] : values) {
    const bool taken = name == "step" || name == "time" || name == "event" ||
                       name.starts_with(kSeconds) || name.starts_with(kMemory);
    CAIRN_CHECK(!name.empty() && !taken, "observe", "expected a name of a value other than '', ",
                "step, time, event, seconds/... and memory/..., which the run has itself, got '",
                name, "'");
  }
}

double loss_of(std::span<const Value> values) {
  const auto loss = std::find_if(values.begin(), values.end(),
                                 [](const Value& value) { return value.name == "loss"; });
  return loss == values.end() ? std::nan("") : loss->value;
}

void put_values(Message& message, std::span<const Value> values) {
  message.put(static_cast<std::uint32_t>(values.size()));
  for (const auto& [name, value] : values) message.put(value).put_text(name);
}

}  // namespace

std::string_view name(EventKind kind) {
  constexpr std::string_view kNames[kEventKinds] = {"skip", "overflow", "restart", "checkpoint",
                                                    "note"};
  return kNames[static_cast<int>(kind)];
}

Run::Run(const std::string& folder, RunOptions options)
    : histogram_every_(options.histogram_every), last_step_(options.first_step) {
  CAIRN_CHECK(options.first_step >= 0, "observe", "expected a first_step of 0 or more, got ",
              options.first_step);
  CAIRN_CHECK(options.histogram_every >= 0, "observe",
              "expected histogram_every of 0 or more, got ", options.histogram_every);
  CAIRN_CHECK(options.renew_seconds >= 0, "observe", "expected renew_seconds of 0 or more, got ",
              options.renew_seconds);
  if (!core::tells_status()) core::tell_job("", options.world.rank, options.world.size);
  core::tell_device(core::str(options.device));
  core::set_memory_step(options.first_step + 1);
  std::optional<ProfiledSteps> profiled = options.profile;
  if (profiled) profiled->first = std::max(profiled->first, last_step() + 1);
  writer_ = std::make_unique<Writer>(folder, std::move(options));
  if (!profiled || profiled->last <= last_step()) return;
  writer_->trace().ask(last_step(), *profiled);
}

Run::~Run() = default;

void Run::step(std::int64_t step, std::span<const Value> values) {
  CAIRN_CHECK(step > last_step(), "observe", "expected steps to rise, got ", step, " after ",
              last_step());
  check_names(values);
  tell_stream_waits(Span::depth_in(this));
  {
    const core::TimeMark mark = core::mark_time(writer_->device());
    Message message(writer_->ring());
    message.put(Told::step).put(steady_seconds()).put(mark).put(step).put(writer_->waited());
    put_values(message, values);
  }
  last_step_.store(step, std::memory_order_relaxed);
  core::tell_step(step, loss_of(values));
  core::set_memory_step(step + 1);
  writer_->trace().stepped(step);
}

/// What the thread's stream waited for ranks, in spans of the run or not.
void Run::tell_stream_waits(std::uint32_t depth) {
  if (writer_->device().is_cpu()) return;
  core::time_waits(core::Stream::current(writer_->device()));
  for (const core::StreamWait& wait : core::take_stream_waits()) {
    Message message(writer_->ring());
    message.put(Told::wait).put(0.0).put(0.0).put(wait.began).put(wait.ended).put(depth);
  }
}

void Run::profile(std::int64_t first_step, std::int64_t last_step) {
  writer_->trace().ask(this->last_step(), {first_step, last_step});
}

namespace {

void wait_for_reductions(std::span<const NamedTensor> parameters) {
  std::set<std::shared_ptr<core::GradientReducer>> reducers;
  for (const NamedTensor& parameter : parameters) {
    const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
    const auto reducer = slot == nullptr ? nullptr : slot->reducer();
    if (reducer != nullptr && reducers.insert(reducer).second) reducer->reduce_pending();
  }
}

}  // namespace

void Run::histograms(std::span<const NamedTensor> parameters) {
  const std::int64_t step = last_step() + 1;
  if (histogram_every_ == 0 || step % histogram_every_ != 0) return;
  wait_for_reductions(parameters);
  for (const NamedTensor& parameter : parameters)
    writer_->add(layer_record(parameter, step, unix_seconds()));
}

void Run::image(std::string_view name, const Tensor& pixels) {
  CAIRN_CHECK(!name.empty(), "observe", "expected a name of a picture, got ''");
  ImageRecord record = image_record(name, pixels);
  record.step = last_step();
  record.time = unix_seconds();
  writer_->add(std::move(record));
}

void Run::text(std::string_view name, std::string_view text) {
  constexpr std::size_t kMost = std::size_t{1} << 18;
  CAIRN_CHECK(!name.empty(), "observe", "expected a name of a text, got ''");
  writer_->add(TextRecord{.step = last_step(),
                          .time = unix_seconds(),
                          .name = std::string(name),
                          .text = std::string(text.substr(0, kMost))});
}

void Run::summary(std::span<const Value> values) {
  check_names(values);
  Message message(writer_->ring());
  message.put(Told::summary).put(steady_seconds());
  put_values(message, values);
}

void Run::event(EventKind kind, std::string_view text, std::string_view culprit,
                std::int64_t step) {
  const bool under_way = kind == EventKind::skip || kind == EventKind::overflow;
  if (step < 0) step = last_step() + (under_way ? 1 : 0);
  Message message(writer_->ring());
  message.put(Told::event).put(steady_seconds()).put(step).put(kind);
  message.put_text(text).put_text(culprit);
}

std::vector<std::string> advice(Run& run) {
  return run.writer_->advice();
}

const std::string& Run::folder() const {
  return writer_->folder();
}

std::string Run::served_at() const {
  return writer_->served_at();
}

Span::Span(Run* run, std::string_view name) : run_(run) {
  begin(name);
}

Span::~Span() {
  end();
}

std::uint32_t Span::depth_in(const Run* run) {
  const Span* span = innermost;
  while (span != nullptr && span->run_ != run) span = span->outer_;
  return span == nullptr ? 0 : span->depth_ + 1;
}

void Span::next(std::string_view name) {
  end();
  begin(name);
}

void Span::begin(std::string_view name) {
  CAIRN_CHECK(name != "step" && name != "wait", "observe", "expected a name of a part of a step, ",
              "got '", name, "', which the run has itself");
  if (run_ == nullptr) return;
  name_ = name;
  depth_ = depth_in(run_);
  run_->tell_stream_waits(depth_);
  waited_ = run_->writer_->waited();
  outer_ = innermost;
  innermost = this;
  label_.emplace(name);
  began_ = core::mark_time(run_->writer_->device());
  begin_ = steady_seconds();
  core::tell_part(name_, begin_);
}

void Span::end() {
  if (run_ == nullptr) return;
  run_->tell_stream_waits(depth_ + 1);
  const core::TimeMark ended = core::mark_time(run_->writer_->device());
  const double now = steady_seconds();
  innermost = outer_;
  outer_ != nullptr ? core::tell_part(outer_->name_, outer_->begin_) : core::tell_part("", 0);
  label_.reset();
  Message message(run_->writer_->ring());
  message.put(Told::span).put(begin_).put(now).put(began_).put(ended);
  message.put(run_->writer_->waited() - waited_).put(depth_).put_text(name_);
}

}  // namespace cairn::observe
