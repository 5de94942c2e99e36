// The command line: flags with a value each.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace plain {

class Flags {
 public:
  Flags(int argc, char** argv) : words_(argv + 1, argv + argc) {}

  std::string text(const std::string& name, const std::string& otherwise) {
    for (std::size_t i = 0; i + 1 < words_.size(); i += 2) {
      if (words_[i] != name) continue;
      const std::string value = words_[i + 1];
      words_.erase(words_.begin() + static_cast<std::ptrdiff_t>(i),
                   words_.begin() + static_cast<std::ptrdiff_t>(i) + 2);
      return value;
    }
    return otherwise;
  }
  double number(const std::string& name, double otherwise) {
    const std::string value = text(name, "");
    return value.empty() ? otherwise : std::stod(value);
  }
  /// Throws where the command line holds more than what was asked for.
  void end() const {
    if (!words_.empty())
      throw std::invalid_argument("expected a known flag and a value, got " + words_[0]);
  }

 private:
  std::vector<std::string> words_;
};

}  // namespace plain
