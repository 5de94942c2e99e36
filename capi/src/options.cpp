#include "options.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <sstream>

#include "cairn/core/error.h"

namespace cairn::capi {

namespace {

template <class T>
std::optional<T> parsed(const std::string& text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return value;
}

}  // namespace

Options::Options(const char* function, const char* text) : function_(function) {
  std::istringstream words(text == nullptr ? "" : text);
  for (std::string word; words >> word;) {
    const std::size_t sign = word.find('=');
    CAIRN_CHECK(sign != std::string::npos && sign > 0 && sign + 1 < word.size(), function_,
                "expected options as name=value, got '", word, "'");
    const bool added = given_.emplace(word.substr(0, sign), word.substr(sign + 1)).second;
    CAIRN_CHECK(added, function_, "expected each option once, got '", word, "' again");
  }
}

const std::string* Options::find(const char* name) {
  known_.emplace_back(name);
  const auto found = given_.find(name);
  return found == given_.end() ? nullptr : &found->second;
}

double Options::number(const char* name, const std::string& text) const {
  const auto value = parsed<double>(text);
  CAIRN_CHECK(value, function_, "expected a number as ", name, ", got '", text, "'");
  return *value;
}

std::int64_t Options::integer(const char* name, const std::string& text) const {
  const auto value = parsed<std::int64_t>(text);
  CAIRN_CHECK(value, function_, "expected an integer as ", name, ", got '", text, "'");
  return *value;
}

void Options::read(const char* name, double& value) {
  if (const std::string* text = find(name)) value = number(name, *text);
}

void Options::read(const char* name, std::optional<double>& value) {
  if (const std::string* text = find(name)) value = number(name, *text);
}

void Options::read(const char* name, std::int64_t& value) {
  if (const std::string* text = find(name)) value = integer(name, *text);
}

void Options::read(const char* name, int& value) {
  std::int64_t wide = value;
  read(name, wide);
  CAIRN_CHECK(wide == static_cast<int>(wide), function_, "expected a smaller number as ", name,
              ", got ", wide);
  value = static_cast<int>(wide);
}

void Options::read(const char* name, bool& value) {
  std::int64_t number = value ? 1 : 0;
  read(name, number);
  CAIRN_CHECK(number == 0 || number == 1, function_, "expected 0 or 1 as ", name, ", got ", number);
  value = number == 1;
}

void Options::read(const char* name, std::string& value) {
  if (const std::string* text = find(name)) value = *text;
}

void Options::end() const {
  for (const auto& [name, text] : given_) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    std::string names;
    for (const std::string& known : known_) names += (names.empty() ? "" : ", ") + known;
    core::fail(function_, "expected an option of ", names, "; got '", name, "'");
  }
}

}  // namespace cairn::capi
