#include "formats/json_text.h"

#include <set>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

nlohmann::ordered_json parse_json(const std::string& text, const char* where,
                                  const std::string& path) {
  using Json = nlohmann::ordered_json;
  std::vector<std::set<std::string>> open;  // keys of the objects around the current place
  const Json::parser_callback_t check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kDeepestJson) {
      core::fail<core::DataError>(where, "expected at most ", kDeepestJson, " levels in '", path,
                                  "', got more");
    }
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second) {
      core::fail<core::DataError>(where, "expected distinct names in '", path, "', got '",
                                  value.get<std::string>(), "' twice");
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& e) {
    core::fail<core::DataError>(where, "expected JSON in '", path,
                                "', got text that is not: ", e.what());
  }
}

}  // namespace cairn::checkpointing
