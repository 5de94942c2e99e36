#include "open_metrics.h"

#include <cmath>
#include <initializer_list>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/status.h"
#include "cairn/core/version.h"
#include "number.h"

namespace cairn::observe {

namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out;
}

std::string spelled(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return number(value);
}

/// Families of samples, each of which stands together.
class Text {
 public:
  explicit Text(int rank) : rank_(core::str("rank=\"", rank, "\"")) {}
  void family(const std::string& name, const char* type, const char* unit, const char* help) {
    family_ = "cairn_" + name;
    text_ += "# TYPE " + family_ + " " + type + "\n";
    if (*unit != '\0') text_ += "# UNIT " + family_ + " " + unit + "\n";
    text_ += "# HELP " + family_ + " " + help + "\n";
  }
  using Labels = std::initializer_list<std::pair<const char*, std::string_view>>;
  void sample(double value, Labels labels = {}, const char* suffix = "") {
    text_ += family_ + suffix + "{" + rank_;
    for (const auto& [label, of] : labels) text_ += core::str(",", label, "=\"", escaped(of), "\"");
    text_ += "} " + spelled(value) + "\n";
  }
  std::string finish() { return text_ + "# EOF\n"; }

 private:
  std::string rank_, family_, text_;
};

/// A sample for each curve whose name begins so, without that.
void samples(Text& text, const History& history, std::string_view prefix, const char* label) {
  for (const Curve& curve : history.curves()) {
    if (curve.name.starts_with(prefix))
      text.sample(curve.last, {{label, std::string_view(curve.name).substr(prefix.size())}});
  }
}

}  // namespace

std::string open_metrics(const History& history, const RunFacts& facts) {
  Text text(facts.rank);
  text.family("run", "info", "", "The run, and Cairn's version.");
  text.sample(1, {{"name", facts.name}, {"version", core::version()}}, "_info");
  text.family("running", "gauge", "", "1 while the run goes on, 0 after its end.");
  text.sample(facts.running ? 1 : 0);
  text.family("renewed_timestamp_seconds", "gauge", "seconds", "When this was written.");
  text.sample(facts.renewed);
  text.family("step", "gauge", "", "The last step.");
  text.sample(static_cast<double>(history.last_step()));
  text.family("value", "gauge", "", "A value of the last step that had it.");
  for (const Curve& curve : history.curves()) {
    if (!curve.name.starts_with(kSeconds) && !curve.name.starts_with(kMemory))
      text.sample(curve.last, {{"name", curve.name}});
  }
  text.family("step_part_seconds", "gauge", "seconds", "Of the last step: in all, and of parts.");
  samples(text, history, kSeconds, "part");
  text.family("memory_bytes", "gauge", "bytes", "Live tensors, by category.");
  samples(text, history, kMemory, "category");
  text.family("summary", "gauge", "", "A number of the whole run.");
  for (const auto& [name, value] : history.summary()) text.sample(value, {{"name", name}});
  text.family("events", "counter", "", "What befell the run.");
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    text.sample(static_cast<double>(history.events(kind)), {{"kind", name(kind)}}, "_total");
  }
  if (history.last_checkpoint() > 0) {
    text.family("checkpoint_timestamp_seconds", "gauge", "seconds", "When the last was saved.");
    text.sample(history.last_checkpoint());
  }
  const core::StatusTotals totals = core::status_totals();
  text.family("collectives", "counter", "", "With other ranks, by this process.");
  text.sample(static_cast<double>(totals.collectives), {}, "_total");
  text.family("wait_seconds", "counter", "seconds", "In them, or waiting for their end.");
  text.sample(totals.waited, {}, "_total");
  text.family("restarts", "counter", "", "Of all ranks by cairn-run, after one had failed.");
  text.sample(facts.restarts, {}, "_total");
  text.family("dropped_records", "counter", "", "Told while a thread's ring was full.");
  text.sample(static_cast<double>(facts.dropped), {}, "_total");
  text.family("unwritten_records", "counter", "", "Of files that could not be written.");
  text.sample(static_cast<double>(facts.unwritten), {}, "_total");
  return text.finish();
}

}  // namespace cairn::observe
