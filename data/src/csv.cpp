#include "cairn/data/csv.h"

#include <charconv>
#include <cmath>
#include <string_view>

#include "file_bytes.h"

namespace cairn::data {

namespace {

using core::DataError;
using core::fail;
using Cells = std::vector<std::string_view>;

constexpr const char* kReadCsv = "read_csv";
constexpr double kLargestLabel = 9007199254740992.0;  // 2^53: whole numbers are exact up to here

struct Line {
  std::size_t number;  // in the file, from 1
  Cells cells;
};

std::string_view trim(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::string_view clean(std::string_view cell) {
  cell = trim(cell);
  const bool quoted = cell.size() >= 2 && cell.front() == '"' && cell.back() == '"';
  return quoted ? trim(cell.substr(1, cell.size() - 2)) : cell;
}

Cells split(std::string_view line, char separator) {
  Cells cells;
  while (true) {
    const std::size_t end = line.find(separator);
    cells.push_back(clean(line.substr(0, end)));
    if (end == std::string_view::npos) return cells;
    line.remove_prefix(end + 1);
  }
}

std::vector<Line> split_lines(std::string_view text, char separator) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.substr(0, 3) == kByteOrderMark) text.remove_prefix(3);
  std::vector<Line> lines;
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (!trim(line).empty()) lines.push_back({number, split(line, separator)});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

std::optional<double> parse_number(std::string_view cell) {
  if (!cell.empty() && cell.front() == '+') cell.remove_prefix(1);
  double value = 0.0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc{} || end != cell.data() + cell.size()) return std::nullopt;
  return value;
}

bool is_header(const Cells& cells, CsvHeader setting) {
  switch (setting) {
    case CsvHeader::present:
      return true;
    case CsvHeader::absent:
      return false;
    case CsvHeader::automatic:
      break;
  }
  for (std::string_view cell : cells) {
    if (!parse_number(cell)) return true;
  }
  return false;
}

class Reader {
 public:
  Reader(const std::string& path, const CsvOptions& options) : path_(path), options_(options) {}

  CsvTable read(std::string_view text) {
    std::vector<Line> lines = split_lines(text, options_.separator);
    if (!lines.empty() && is_header(lines.front().cells, options_.header)) {
      header_.assign(lines.front().cells.begin(), lines.front().cells.end());
      lines.erase(lines.begin());
    }
    if (lines.empty())
      fail<DataError>(kReadCsv, "expected lines of numbers in '", path_, "', got none");
    columns_ = header_.empty() ? lines.front().cells.size() : header_.size();
    label_ = find_label();
    return fill(lines);
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  std::size_t find_label() const {
    if (!options_.label_column) return kNone;
    const std::string& wanted = *options_.label_column;
    for (std::size_t i = 0; i < header_.size(); ++i) {
      if (header_[i] == wanted) return i;
    }
    long long number = 0;
    const auto [end, error] = std::from_chars(wanted.data(), wanted.data() + wanted.size(), number);
    const auto columns = static_cast<long long>(columns_);
    const bool is_number = error == std::errc{} && end == wanted.data() + wanted.size();
    CAIRN_CHECK(is_number && number >= -columns && number < columns, kReadCsv,
                "expected a label column of '", path_, "' (", names(), "0 to ", columns - 1,
                ", or from -1 back to ", -columns, "), got '", wanted, "'");
    return static_cast<std::size_t>(number < 0 ? number + columns : number);
  }

  std::string names() const {
    std::string list;
    for (const std::string& name : header_) list += core::str("'", name, "', ");
    return list;
  }

  CsvTable fill(const std::vector<Line>& lines) const {
    const auto rows = static_cast<std::int64_t>(lines.size());
    const auto features = static_cast<std::int64_t>(columns_ - (label_ == kNone ? 0 : 1));
    CsvTable table{Tensor::empty({rows, features}, DType::f32, Device{}), {}, {}};
    if (label_ != kNone) table.labels = Tensor::empty({rows}, DType::i64, Device{});
    auto* feature = table.features.data<float>();
    auto* label = label_ == kNone ? nullptr : table.labels.data<std::int64_t>();
    for (const Line& line : lines) {
      check_width(line);
      for (std::size_t column = 0; column < columns_; ++column) {
        const double value = number_at(line, column);
        if (column == label_) {
          *label++ = whole(line, column, value);
        } else {
          *feature++ = static_cast<float>(value);
        }
      }
    }
    for (std::size_t i = 0; i < header_.size(); ++i) {
      if (i != label_) table.names.push_back(header_[i]);
    }
    return table;
  }

  void check_width(const Line& line) const {
    if (line.cells.size() == columns_) return;
    fail<DataError>(kReadCsv, "expected ", columns_, " cells in '", path_, "' line ", line.number,
                    ", got ", line.cells.size());
  }

  double number_at(const Line& line, std::size_t column) const {
    const std::optional<double> value = parse_number(line.cells[column]);
    if (!value || !std::isfinite(*value)) bad_cell("a finite number", line, column);
    return *value;
  }

  std::int64_t whole(const Line& line, std::size_t column, double value) const {
    const bool fits = value >= 0.0 && value <= kLargestLabel && value == std::floor(value);
    if (!fits) bad_cell("a label (a whole number >= 0)", line, column);
    return static_cast<std::int64_t>(value);
  }

  [[noreturn]] void bad_cell(const char* expected, const Line& line, std::size_t column) const {
    fail<DataError>(kReadCsv, "expected ", expected, " in '", path_, "' line ", line.number,
                    ", column ", column, ", got '", line.cells[column], "'");
  }

  const std::string& path_;
  const CsvOptions& options_;
  std::vector<std::string> header_;
  std::size_t columns_ = 0;
  std::size_t label_ = kNone;
};

}  // namespace

CsvTable read_csv(const std::string& path, const CsvOptions& options) {
  const std::string text = detail::read_maybe_gzip(path, kReadCsv);
  return Reader(path, options).read(text);
}

TensorDataset csv_dataset(const CsvTable& table) {
  return TensorDataset(table.features, table.labels);
}

}  // namespace cairn::data
