// Tables of numbers in text form, one sample a line: "5.1,3.5,1.4,0".
//
// Every cell is a decimal number (a dot as decimal sign whatever the locale), spaces and one pair
// of double quotes around it are ignored, and so are empty lines. All lines have the same number of
// cells. Anything else throws DataError with file, line, column and cell.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cairn/data/dataset.h"

namespace cairn::data {

/// Whether the first line names the columns; automatic: it does if one of its cells is no number.
enum class CsvHeader { automatic, present, absent };

struct CsvOptions {
  char separator = ',';
  CsvHeader header = CsvHeader::automatic;
  /// The column of labels: a name of the header, or a number (0 is the first column, -1 the last).
  /// Where it is unset, all columns are features.
  std::optional<std::string> label_column;
};

struct CsvTable {
  Tensor features;                 // [N, F] f32, the columns in order without the label's
  Tensor labels;                   // [N] i64, whole numbers >= 0; undefined without a label column
  std::vector<std::string> names;  // of the F features; empty without a header
};

CsvTable read_csv(const std::string& path, const CsvOptions& options = {});

/// The table as samples of input [F] f32 and label i64.
TensorDataset csv_dataset(const CsvTable& table);

}  // namespace cairn::data
