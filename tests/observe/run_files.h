// Reads what a run wrote, with nothing of what wrote it.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace cairn::test {

inline std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

inline std::vector<std::string> lines_of(const std::filesystem::path& path) {
  std::vector<std::string> lines;
  std::istringstream text(text_of(path));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

inline std::vector<nlohmann::json> json_lines(const std::filesystem::path& path) {
  std::vector<nlohmann::json> all;
  for (const std::string& line : lines_of(path)) all.push_back(nlohmann::json::parse(line));
  return all;
}

/// Those of them that are steps.
inline std::vector<nlohmann::json> step_lines(const std::filesystem::path& folder) {
  std::vector<nlohmann::json> steps;
  for (auto& line : json_lines(folder / "metrics.jsonl")) {
    if (line.contains("step") && !line.contains("event")) steps.push_back(std::move(line));
  }
  return steps;
}

/// What the page has of the run.
inline nlohmann::json page_data(const std::filesystem::path& folder) {
  const std::string page = text_of(folder / "report.html");
  const std::string begin = "<script id=\"data\" type=\"application/json\">", end = "</script>";
  const std::size_t from = page.find(begin) + begin.size();
  return nlohmann::json::parse(page.substr(from, page.find(end, from) - from));
}

inline nlohmann::json page_curve(const nlohmann::json& data, const std::string& name) {
  for (const auto& curve : data["curves"]) {
    if (curve["name"] == name) return curve["points"];
  }
  return nullptr;
}

inline std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().find("tfevents") != std::string::npos)
      found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace cairn::test
