// Aligned columns for people.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace cairn::amp {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void align_right(std::set<std::size_t> columns) { right_ = std::move(columns); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Two blanks between columns, none at the ends of lines.
  std::string str() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::set<std::size_t> right_;
};

}  // namespace cairn::amp
