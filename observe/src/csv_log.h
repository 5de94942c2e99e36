// metrics.csv: step, time, and a column a name, as they first came. Values that a step lacks are
// empty; others nan, inf and -inf.
#pragma once

#include <string>
#include <vector>

#include "files.h"
#include "records.h"

namespace cairn::observe {

class CsvLog {
 public:
  /// Throws core::IoError where the file cannot be written.
  CsvLog(Failures& failures, std::string path, std::size_t most_bytes);
  void add(const StepRecord& record);
  void flush() { file_.flush(); }

 private:
  void add_columns(const StepRecord& record);

  Failures& failures_;
  LogFile file_;
  std::string path_;
  std::size_t most_bytes_;
  std::vector<std::string> columns_;
};

}  // namespace cairn::observe
