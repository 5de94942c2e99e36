// TensorBoard's event files: TFRecords of the protobuf message tensorflow.Event
// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files.h"
#include "histogram.h"
#include "image.h"
#include "records.h"

namespace cairn::observe {

/// CRC-32C (Castagnoli), as in RFC 3720.
std::uint32_t crc32c(std::string_view bytes);
/// Length, its masked checksum, the data, its masked checksum.
std::string tf_record(std::string_view data);

class EventLog {
 public:
  /// The files of an earlier run in the folder go, unless the run goes on from `first_step`: then
  /// TensorBoard is told to forget what they have of later steps. Throws core::IoError.
  EventLog(Failures& failures, std::string folder, std::int64_t first_step, double time,
           std::size_t most_bytes);
  void add(const StepRecord& record);
  /// As histograms "weights/NAME" and "gradients/NAME".
  void add(const LayerRecord& record);
  /// As text, tag "events/KIND".
  void add(const EventRecord& event);
  void add(const ImageRecord& image);
  void add(const TextRecord& text);
  /// What the plugin of that name compares runs by; what reads as a number is one.
  void add_hyperparameters(double time,
                           const std::vector<std::pair<std::string, std::string>>& values);
  /// Text of the whole run.
  void add_text(double time, std::int64_t step, const std::string& tag, const std::string& text);
  void flush() { file_.flush(); }

 private:
  void begin_file(double time);
  void add_event(double time, std::int64_t step, const std::string& summary);

  LogFile file_;
  std::string folder_, before_;  // before_: the file before this one
  std::int64_t started_;
  int number_ = 0;
  std::size_t most_bytes_;
};

}  // namespace cairn::observe
