// metrics.jsonl: {"step":1,"time":...,"loss":2.3}, {"event":"skip","step":7,...}, and a summary
// without a step. JSON has no NaN and no infinity: null.
#pragma once

#include <functional>
#include <string>

#include "files.h"
#include "records.h"

namespace cairn::observe {

class JsonLog {
 public:
  JsonLog(Failures& failures, std::string path, std::size_t most_bytes)
      : file_(failures), path_(std::move(path)), most_bytes_(most_bytes) {}

  struct Newest {
    std::int64_t step = 0;
    double time = 0;  // of the last record; 0: there was none
  };
  /// Hands over what the file holds up to `last_step`; what comes later, or is no record of ours,
  /// goes. Returns how far the file had come. Throws core::IoError where it cannot be written.
  Newest open(std::int64_t last_step, const std::function<void(const StepRecord&)>& step,
              const std::function<void(const EventRecord&)>& event);
  void add(const StepRecord& record);
  void add(const EventRecord& event);
  void add_summary(double time, const NamedValues& values);
  void flush() { file_.flush(); }

 private:
  void add_line(const std::string& line);
  LogFile file_;
  std::string path_;
  std::size_t most_bytes_;
};

}  // namespace cairn::observe
