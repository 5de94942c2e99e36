#include <map>
#include <nlohmann/json.hpp>

#include "cairn/core/error.h"
#include "trace.h"

namespace cairn::observe {

namespace {

using nlohmann::json;

/// Events as text, one after another: a tree of all of them would take ten times as much.
class ChromeEvents {
 public:
  explicit ChromeEvents(const RankTrace& rank) : rank_(rank) {}

  std::string write() {
    add_name("process_name", core::str("rank ", rank_.rank), 0);
    for (std::size_t row = 0; row < rank_.rows.size(); ++row)
      add_name("thread_name", rank_.rows[row], row);
    for (const TraceSlice& slice : rank_.slices) add_slice(slice);
    for (const auto& [id, slices] : flows_) add_flow(id, slices);
    for (const RankTrace::Memory& memory : rank_.memory) add_memory(memory);
    for (const RankTrace::Number& number : rank_.numbers)
      add("C", number.name, number.time, 0, {{"args", {{number.name, number.value}}}});
    return std::move(text_);
  }

 private:
  static double micros(TraceTime time) { return static_cast<double>(time) / 1e3; }

  void add(const char* phase, const std::string& name, TraceTime time, std::size_t row,
           const json& more) {
    json event{
        {"ph", phase}, {"name", name}, {"pid", rank_.rank}, {"tid", row}, {"ts", micros(time)}};
    event.update(more);
    text_ += (text_.empty() ? "" : ",\n") + event.dump();
  }

  void add_name(const char* what, const std::string& name, std::size_t row) {
    add("M", what, 0, row, {{"args", {{"name", name}}}});
  }

  // As Kineto calls what PyTorch does: readers of its traces look for these.
  static const char* category(const TraceSlice& slice) {
    if (slice.kind == "step" || slice.kind == "span") return "user_annotation";
    return slice.kind == "stream" || slice.kind == "collective" ? slice.kind.c_str() : "cpu_op";
  }

  void add_slice(const TraceSlice& slice) {
    json args{{"kind", slice.kind}};
    if (slice.kind == "collective")
      args.update({{"sequence", slice.sequence}, {"bytes", slice.bytes}, {"group", slice.group}});
    const std::string name =
        slice.kind == "step" ? "ProfilerStep#" + slice.name.substr(5) : slice.name;
    add("X", name, slice.begin, slice.row,
        {{"cat", category(slice)}, {"dur", micros(slice.end - slice.begin)}, {"args", args}});
    for (const std::uint64_t flow : slice.flows) flows_[flow].emplace(slice.begin, &slice);
  }

  // An arrow joins the innermost slices around its points.
  using ByBegin = std::multimap<TraceTime, const TraceSlice*>;
  void add_flow(std::uint64_t id, const ByBegin& slices) {
    if (slices.size() < 2) return;
    std::size_t left = slices.size();
    const char* phase = "s";
    for (const auto& [time, slice] : slices) {
      if (--left == 0) phase = "f";
      add(phase, "gradients", time, slice->row, {{"cat", "flow"}, {"id", id}, {"bp", "e"}});
      phase = "t";
    }
  }

  void add_memory(const RankTrace::Memory& memory) {
    json bytes;
    for (int i = 0; i < core::kMemoryCategories; ++i)
      bytes[std::string(core::name(static_cast<core::MemoryCategory>(i)))] =
          memory.bytes[static_cast<std::size_t>(i)];
    add("C", "memory", memory.time, 0, {{"args", bytes}});
  }

  const RankTrace& rank_;
  std::string text_;
  std::map<std::uint64_t, ByBegin> flows_;
};

}  // namespace

std::string chrome_trace(const RankTrace& rank) {
  json head{
      {"schemaVersion", 1},
      {"displayTimeUnit", "ms"},
      {"distributedInfo", {{"backend", "cairn"}, {"rank", rank.rank}, {"world_size", rank.ranks}}},
      {"host", rank.host},
      {"clock_error_us", 1e6 * rank.clock_error},
      {"lost_records", rank.lost}};
  std::string text = head.dump();
  text.pop_back();  // its }
  return text + ",\"traceEvents\":[\n" + ChromeEvents(rank).write() + "\n]}\n";
}

}  // namespace cairn::observe
