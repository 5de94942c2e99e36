// Text for people: aligned columns, lists.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cairn::core {

/// "a, b, c"
inline std::string joined(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

/// Rows of as many cells as the header has.
class TextTable {
 public:
  /// `right`: the columns of numbers, which are aligned at their ends.
  TextTable(std::vector<std::string> header, std::set<std::size_t> right)
      : rows_{std::move(header)}, right_(std::move(right)) {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Two blanks between columns, none at the ends of lines.
  std::string str() const {
    std::vector<std::size_t> widths(rows_[0].size(), 0);
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string text;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string blanks(widths[i] - row[i].size(), ' ');
        line += (i == 0 ? "" : "  ") + (right_.count(i) ? blanks + row[i] : row[i] + blanks);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + "\n";
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  std::set<std::size_t> right_;
};

}  // namespace cairn::core
