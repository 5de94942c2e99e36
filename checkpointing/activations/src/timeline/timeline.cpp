#include "cairn/checkpointing/timeline.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "timeline/timeline_page.h"

namespace cairn::checkpointing {

namespace {

using nlohmann::json;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

json categories() {
  json names = json::array();
  for (int i = 0; i < core::kMemoryCategories; ++i) {
    names.push_back(core::name(static_cast<core::MemoryCategory>(i)));
  }
  return names;
}

json as_json(const TimelineRecord& record) {
  json all{{"name", record.name}, {"device", core::str(record.device)}};
  for (const auto& s : record.samples) {
    all["samples"].push_back({s.seconds, s.bytes, s.total, s.peak, s.during});
  }
  all["operations"] = json::array();
  for (const auto& o : record.operations) {
    all["operations"].push_back({o.name, autograd::name(o.phase), o.begin, o.end});
  }
  all["peak"] = record.peak_sample();
  return all;
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    core::fail<core::IoError>("timeline", "expected to write ", path,
                              ", got an error (is there such a ", "folder, and room?)");
  }
}

// "</script>" in a name must not end the script.
std::string embedded(const json& value) {
  std::string text = value.dump();
  for (std::size_t at = 0; (at = text.find("</", at)) != std::string::npos;)
    text.replace(at, 2, "<\\/");
  return text;
}

}  // namespace

std::size_t TimelineRecord::peak_sample() const {
  const auto highest =
      std::max_element(samples.begin(), samples.end(),
                       [](const Sample& a, const Sample& b) { return a.peak < b.peak; });
  return static_cast<std::size_t>(highest - samples.begin());
}

Timeline::Timeline(std::string name, Device device) : began_(steady_seconds()) {
  record_.name = std::move(name);
  record_.device = device;
  core::reset_peak_memory(device);
  sample();
}

double Timeline::now() const {
  return steady_seconds() - began_;
}

void Timeline::sample() {
  const core::MemoryStats stats = core::memory_stats(record_.device);
  core::reset_peak_memory(record_.device);
  const std::string during = open_.empty() ? "" : record_.operations[open_.back()].name;
  record_.samples.push_back({now(), stats.current, stats.current_total, stats.peak_total, during});
}

void Timeline::on_begin(const autograd::OpEvent& event) {
  sample();
  open_.push_back(record_.operations.size());
  record_.operations.push_back({event.name, event.phase, now(), 0});
}

void Timeline::on_end(const autograd::OpEvent& event) {
  // An operation that threw has begun and not ended.
  while (!open_.empty() && record_.operations[open_.back()].name != event.name) open_.pop_back();
  if (open_.empty()) return;
  sample();
  record_.operations[open_.back()].end = now();
  open_.pop_back();
}

void Timeline::count(const std::string& name, double value) {
  record_.counts.push_back({name, now(), value});
}

void Timeline::ran(const core::ObservedWork& work) {
  const std::lock_guard lock(work_mutex_);
  work_.push_back(work);
}

namespace {

// Streams of one name are told apart by their threads.
int row_of(const core::ObservedWork& work,
           std::map<std::pair<std::string, std::thread::id>, int>& known,
           std::vector<std::string>& rows) {
  const std::string name = work.stream.empty() ? "collectives" : work.stream;
  const auto [row, fresh] = known.try_emplace({name, work.thread}, static_cast<int>(rows.size()));
  if (fresh) rows.push_back(name);
  return row->second;
}

}  // namespace

TimelineRecord Timeline::snapshot() {
  core::Stream::current(record_.device).synchronize();
  sample();
  TimelineRecord record = record_;
  std::map<std::pair<std::string, std::thread::id>, int> known;
  const std::lock_guard lock(work_mutex_);
  for (const core::ObservedWork& work : work_) {
    const bool collective = work.kind == core::ObservedWork::Kind::collective;
    record.work.push_back({work.name, row_of(work, known, record.rows), collective,
                           work.begin - began_, work.end - began_});
  }
  return record;
}

void write_page(const std::string& path, const std::vector<TimelineRecord>& records) {
  CAIRN_CHECK(!records.empty(), "timeline", "expected records, got none");
  json data{{"categories", categories()}, {"records", json::array()}};
  for (const TimelineRecord& record : records) data["records"].push_back(as_json(record));
  std::string page = kTimelinePage;
  const std::string place = "DATA";
  page.replace(page.find(place), place.size(), embedded(data));
  write_text(path, page);
}

namespace {

double micros(double seconds) {
  return 1e6 * seconds;
}

json named_row(int row, const std::string& name) {
  return {
      {"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", row}, {"args", {{"name", name}}}};
}

json span(const std::string& name, const char* category, int row, double begin, double end) {
  return {{"name", name},
          {"cat", category},
          {"ph", "X"},
          {"pid", 0},
          {"tid", row},
          {"ts", micros(begin)},
          {"dur", micros(std::max(0.0, end - begin))}};
}

json counter(const std::string& name, double seconds, json values) {
  return {{"name", name},
          {"ph", "C"},
          {"pid", 0},
          {"ts", micros(seconds)},
          {"args", std::move(values)}};
}

}  // namespace

void write_trace(const std::string& path, const TimelineRecord& record) {
  json events = json::array();
  events.push_back(
      {{"name", "process_name"}, {"ph", "M"}, {"pid", 0}, {"args", {{"name", record.name}}}});
  events.push_back(named_row(0, "operations"));
  for (std::size_t i = 0; i < record.rows.size(); ++i) {
    events.push_back(named_row(static_cast<int>(i) + 1, record.rows[i]));
  }
  for (const auto& o : record.operations) {
    events.push_back(span(o.name, autograd::name(o.phase), 0, o.begin, o.end));
  }
  for (const auto& w : record.work) {
    events.push_back(
        span(w.name, w.collective ? "collective" : "stream", w.row + 1, w.begin, w.end));
  }
  for (const auto& s : record.samples) {
    json bytes;
    for (int i = 0; i < core::kMemoryCategories; ++i) {
      bytes[std::string(core::name(static_cast<core::MemoryCategory>(i)))] =
          s.bytes[static_cast<std::size_t>(i)];
    }
    events.push_back(counter(core::str("memory of ", record.device), s.seconds, bytes));
  }
  for (const auto& c : record.counts) {
    events.push_back(counter(c.name, c.seconds, {{c.name, c.value}}));
  }
  write_text(path, json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump());
}

}  // namespace cairn::checkpointing
