#include "json_log.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

namespace cairn::observe {

namespace {

using nlohmann::ordered_json;

double to_milliseconds(double time) {
  return std::round(1e3 * time) / 1e3;
}

ordered_json with_values(ordered_json line, const NamedValues& values) {
  for (const auto& [name, value] : values) line[name] = value;
  return line;
}

std::string text_of(const ordered_json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_string() ? found->get<std::string>() : "";
}

std::optional<EventKind> kind_of(const std::string& text) {
  for (int i = 0; i < kEventKinds; ++i) {
    if (text == name(static_cast<EventKind>(i))) return static_cast<EventKind>(i);
  }
  return std::nullopt;
}

NamedValues values_of(const ordered_json& line) {
  NamedValues values;
  for (const auto& [name, value] : line.items()) {
    if (name == "step" || name == "time") continue;
    if (value.is_number()) values.emplace_back(name, value.get<double>());
    if (value.is_null()) values.emplace_back(name, std::numeric_limits<double>::quiet_NaN());
  }
  return values;
}

/// The line's step and time, where it is a record of a step or an event.
std::optional<StepRecord> head_of(const ordered_json& line) {
  if (!line.is_object() || !line.contains("step") || !line.contains("time")) return std::nullopt;
  const auto &step = line["step"], &time = line["time"];
  if (!step.is_number_integer() || !time.is_number()) return std::nullopt;
  if (step.get<std::int64_t>() < 0) return std::nullopt;
  return StepRecord{.step = step.get<std::int64_t>(), .time = time.get<double>(), .values = {}};
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return std::string(text);
  const auto replace = ordered_json::error_handler_t::replace;
  return ordered_json::parse(ordered_json(text).dump(-1, ' ', false, replace)).get<std::string>();
}

JsonLog::Newest JsonLog::open(std::int64_t last_step,
                              const std::function<void(const StepRecord&)>& step,
                              const std::function<void(const EventRecord&)>& event) {
  std::size_t kept = 0;
  bool keeps = true;
  Newest newest;
  std::ifstream file(path_);
  std::int64_t before = -1;
  for (std::string text; last_step > 0 && std::getline(file, text) && !file.eof();) {
    const ordered_json line = ordered_json::parse(text, nullptr, false);
    std::optional<StepRecord> head = head_of(line);
    if (!head) break;
    const auto kind = kind_of(text_of(line, "event"));
    newest = {kind ? newest.step : head->step, head->time};
    keeps = keeps && head->step <= last_step;
    if (!keeps) continue;
    if (kind) {
      event({head->step, head->time, *kind, text_of(line, "text"), text_of(line, "culprit")});
    } else {
      if (head->step <= before) break;
      before = head->step;
      head->values = values_of(line);
      step(*head);
    }
    kept += text.size() + 1;
  }
  file_.open(path_, kept);
  return newest;
}

void JsonLog::add_line(const std::string& line) {
  if (file_.bytes() > most_bytes_) {
    file_.flush();
    std::rename(path_.c_str(), (path_ + ".1").c_str());
    file_.open(path_, 0);
  }
  file_.add(line + "\n");
}

void JsonLog::add(const StepRecord& record) {
  add_line(
      with_values({{"step", record.step}, {"time", to_milliseconds(record.time)}}, record.values)
          .dump());
}

void JsonLog::add(const EventRecord& event) {
  ordered_json line{{"event", name(event.kind)},
                    {"step", event.step},
                    {"time", to_milliseconds(event.time)},
                    {"text", event.text}};
  if (!event.culprit.empty()) line["culprit"] = event.culprit;
  add_line(line.dump());
}

void JsonLog::add_summary(double time, const NamedValues& values) {
  add_line(with_values({{"time", to_milliseconds(time)}}, values).dump());
}

}  // namespace cairn::observe
