#include "csv_log.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "number.h"

namespace cairn::observe {

namespace {

// As RFC 4180 has it.
std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? "\"\"" : std::string(1, c);
  return out + "\"";
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string header(const std::vector<std::string>& columns) {
  std::string line = "step,time";
  for (const std::string& name : columns) line += "," + quoted(name);
  return line + "\n";
}

}  // namespace

CsvLog::CsvLog(Failures& failures, std::string path, std::size_t most_bytes)
    : failures_(failures), file_(failures), path_(std::move(path)), most_bytes_(most_bytes) {
  file_.open(path_, 0);
}

// The header stands first: with new names the file is written anew.
void CsvLog::add_columns(const StepRecord& record) {
  std::vector<std::string> fresh;
  for (const auto& [name, value] : record.values) {
    const bool known = has(columns_, name) || has(fresh, name);
    if (!known && columns_.size() + fresh.size() < kMostNames) fresh.push_back(name);
  }
  if (fresh.empty() && file_.bytes() > 0) return;
  file_.flush();
  std::ostringstream file;
  file << std::ifstream(path_).rdbuf();
  const std::string old = std::move(file).str(), commas(fresh.size(), ',');
  std::vector<std::string> columns = columns_;
  columns.insert(columns.end(), fresh.begin(), fresh.end());
  std::string whole = header(columns);
  for (std::size_t at = header(columns_).size(); at < old.size();) {
    const std::size_t end = std::min(old.find('\n', at), old.size());
    whole.append(old, at, end - at).append(commas).append("\n");
    at = end + 1;
  }
  if (!replace_file(path_, whole, failures_)) return;
  columns_ = std::move(columns);
  file_.open(path_, whole.size());
}

void CsvLog::add(const StepRecord& record) {
  if (file_.bytes() > most_bytes_) {
    file_.open(path_, 0);
    file_.add(header(columns_));
  }
  add_columns(record);
  std::string line = std::to_string(record.step) + "," + fixed(record.time, 3);
  for (const std::string& name : columns_) {
    line += ",";
    const auto is_it = [&](const auto& value) { return value.first == name; };
    const auto found = std::find_if(record.values.begin(), record.values.end(), is_it);
    if (found != record.values.end()) line += number(found->second);
  }
  file_.add(line + "\n");
}

}  // namespace cairn::observe
