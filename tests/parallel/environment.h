// Environment variables for the length of a scope.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace cairn::test {

/// Sets the job's variables to exactly these (the others unset) and restores what was there.
class JobVariables {
 public:
  explicit JobVariables(const std::map<std::string, std::string>& values) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                             "MASTER_PORT", "CAIRN_JOB_TOKEN", "TORCHELASTIC_USE_AGENT_STORE"}) {
      const char* before = std::getenv(name);
      before_[name] = before ? std::optional<std::string>(before) : std::nullopt;
      const auto found = values.find(name);
      set(name, found == values.end() ? std::nullopt : std::optional<std::string>(found->second));
    }
  }
  ~JobVariables() {
    for (const auto& [name, value] : before_) set(name, value);
  }
  JobVariables(const JobVariables&) = delete;
  JobVariables& operator=(const JobVariables&) = delete;

 private:
  static void set(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      setenv(name.c_str(), value->c_str(), 1);
    } else {
      unsetenv(name.c_str());
    }
  }
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace cairn::test
