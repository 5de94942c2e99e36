#include "cairn/observe/comparison.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cairn/core/error.h"
#include "report.h"

namespace cairn::observe {

namespace {

/// What a run's page holds.
nlohmann::json held_by_page(const std::string& folder) {
  const std::string path = folder + "/report.html";
  const std::string_view begin = R"(<script id="data" type="application/json">)";
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string page = std::move(text).str();
  const std::size_t from = page.find(begin), end = page.find("</script>", from);
  nlohmann::json data;
  if (from != std::string::npos && end != std::string::npos) {
    data = nlohmann::json::parse(page.begin() + static_cast<std::ptrdiff_t>(from + begin.size()),
                                 page.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
  }
  if (data.is_object() && data.contains("curves") && !data.contains("runs")) return data;
  if (page.empty()) {
    core::fail<core::IoError>("observe", "expected the page of a run at ", path,
                              ", got none (is it the folder of --observe?)");
  }
  core::fail<core::DataError>("observe", "expected the page of a run at ", path, ", got another");
}

}  // namespace

std::string comparison(std::span<const std::string> folders) {
  CAIRN_CHECK(folders.size() > 1, "observe", "expected two runs or more to compare, got ",
              folders.size());
  nlohmann::json runs = nlohmann::json::array();
  for (const std::string& folder : folders) {
    runs.push_back(held_by_page(folder));
    runs.back()["name"] = folder;
  }
  return comparison_page(runs.dump());
}

}  // namespace cairn::observe
