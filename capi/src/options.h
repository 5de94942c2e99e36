// Options as text: "lr=1e-3 adamw=1".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cairn::capi {

/// Each option is read once, into the value that holds its default; then end() finds what nobody
/// has asked for.
class Options {
 public:
  /// `text` may be null. Throws InvalidArgument for what is not name=value, and a name twice.
  Options(const char* function, const char* text);

  // Leave the value where the option is not given. Throw InvalidArgument for what is no number, or
  // none of that type.
  void read(const char* name, double& value);
  void read(const char* name, std::optional<double>& value);
  void read(const char* name, bool& value);
  void read(const char* name, int& value);
  void read(const char* name, std::int64_t& value);
  void read(const char* name, std::string& value);
  /// Throws InvalidArgument, with the names that were asked for, where one is left.
  void end() const;

 private:
  /// Null: not given.
  const std::string* find(const char* name);
  double number(const char* name, const std::string& text) const;
  std::int64_t integer(const char* name, const std::string& text) const;

  std::string function_;
  std::map<std::string, std::string> given_;
  std::vector<std::string> known_;
};

}  // namespace cairn::capi
