#include "event_log.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <protozero/pbf_writer.hpp>
#include <system_error>

#include "cairn/core/error.h"

namespace cairn::observe {

namespace {

namespace fs = std::filesystem;
using protozero::pbf_writer;

// Numbers of fields.
namespace event {
enum { wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 };
}
namespace session_log {
enum { status = 1 };
enum { start = 1 };  // of status
}  // namespace session_log
namespace summary {
enum { value = 1 };
}
namespace value {
enum { tag = 1, simple_value = 2, image = 4, histogram = 5, tensor = 8, metadata = 9 };
}
namespace histogram {
enum { low = 1, high = 2, count = 3, sum = 4, sum_of_squares = 5, limits = 6, counts = 7 };
}
namespace image {
enum { height = 1, width = 2, channels = 3, encoded = 4 };
}
namespace metadata {
enum { plugin_data = 1 };
enum { plugin_name = 1, content = 2 };  // of plugin_data
}  // namespace metadata
namespace hyperparameters {  // tensorboard/plugins/hparams/plugin_data.proto
enum { session_start = 3 };
enum { values = 1, start_time = 5 };  // of session_start
enum { key = 1, value = 2 };          // of values
enum { number = 2, text = 3 };        // of value: google.protobuf.Value
}  // namespace hyperparameters
namespace tensor {
enum { dtype = 1, shape = 2, string_value = 8 };
enum { string_type = 7 };          // of dtype
enum { dimension = 2, size = 1 };  // of shape, of a dimension
}  // namespace tensor

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

// As TensorFlow stores checksums of data that may hold checksums.
std::uint32_t masked(std::uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

void append_little_endian(std::string& out, std::uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(number >> (8 * i) & 0xff);
}

void add_scalar(pbf_writer& summary_message, const std::string& tag, double number) {
  pbf_writer message(summary_message, summary::value);
  message.add_string(value::tag, tag);
  message.add_float(value::simple_value, static_cast<float>(number));
}

void add_string(pbf_writer& summary_message, const std::string& tag, const std::string& text) {
  pbf_writer message(summary_message, summary::value);
  message.add_string(value::tag, tag);
  {
    pbf_writer metadata_message(message, value::metadata);
    pbf_writer plugin(metadata_message, metadata::plugin_data);
    plugin.add_string(metadata::plugin_name, "text");
  }
  pbf_writer tensor_message(message, value::tensor);
  tensor_message.add_enum(tensor::dtype, tensor::string_type);
  {
    pbf_writer shape(tensor_message, tensor::shape);
    pbf_writer dimension(shape, tensor::dimension);
    dimension.add_int64(tensor::size, 1);
  }
  tensor_message.add_bytes(tensor::string_value, text);
}

void add_histogram(pbf_writer& summary_message, const std::string& tag, const Histogram& found) {
  if (found.count == 0) return;
  std::vector<double> limits, counts;
  for (const auto& [limit, count] : found.limits) {
    limits.push_back(limit);
    counts.push_back(static_cast<double>(count));
  }
  pbf_writer message(summary_message, summary::value);
  message.add_string(value::tag, tag);
  pbf_writer written(message, value::histogram);
  written.add_double(histogram::low, found.low);
  written.add_double(histogram::high, found.high);
  written.add_double(histogram::count, static_cast<double>(found.count));
  written.add_double(histogram::sum, found.sum);
  written.add_double(histogram::sum_of_squares, found.squares);
  written.add_packed_double(histogram::limits, limits.begin(), limits.end());
  written.add_packed_double(histogram::counts, counts.begin(), counts.end());
}

std::optional<double> as_number(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && read == end ? std::optional(number) : std::nullopt;
}

constexpr const char* kPrefix = "events.out.tfevents.";
constexpr const char* kSuffix = ".cairn";

void remove_files_of_earlier_run(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with(kPrefix) && file.ends_with(kSuffix)) fs::remove(entry.path(), ignored);
  }
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

std::string tf_record(std::string_view data) {
  std::string out;
  append_little_endian(out, data.size(), 8);
  append_little_endian(out, masked(crc32c(out)), 4);
  out += data;
  append_little_endian(out, masked(crc32c(data)), 4);
  return out;
}

EventLog::EventLog(Failures& failures, std::string folder, std::int64_t first_step, double time,
                   std::size_t most_bytes)
    : file_(failures),
      folder_(std::move(folder)),
      started_(static_cast<std::int64_t>(time)),
      most_bytes_(most_bytes) {
  if (first_step == 0) remove_files_of_earlier_run(folder_);
  begin_file(time);
  if (first_step == 0) return;
  std::string data;
  {
    pbf_writer message(data);
    message.add_double(event::wall_time, time);
    message.add_int64(event::step, first_step + 1);
    pbf_writer session(message, event::session_log);
    session.add_enum(session_log::status, session_log::start);
  }
  file_.add(tf_record(data));
}

// TensorBoard reads a folder's files in the order of their names.
void EventLog::begin_file(double time) {
  const std::string last = file_.path();
  std::array<char, 40> name;
  do {  // another run of this second
    std::snprintf(name.data(), name.size(), "%010lld.%04d", static_cast<long long>(started_),
                  number_++);
  } while (fs::exists(core::str(folder_, "/", kPrefix, name.data(), kSuffix)));
  file_.open(core::str(folder_, "/", kPrefix, name.data(), kSuffix), 0);
  std::error_code ignored;
  if (!before_.empty()) fs::remove(before_, ignored);
  before_ = last;
  std::string data;
  pbf_writer message(data);
  message.add_double(event::wall_time, time);
  message.add_string(event::file_version, "brain.Event:2");
  file_.add(tf_record(data));
}

void EventLog::add_event(double time, std::int64_t step, const std::string& summary_data) {
  if (file_.bytes() > most_bytes_) begin_file(time);
  std::string data;
  pbf_writer message(data);
  message.add_double(event::wall_time, time);
  message.add_int64(event::step, step);
  message.add_message(event::summary, summary_data);
  file_.add(tf_record(data));
}

void EventLog::add(const StepRecord& record) {
  std::string data;
  pbf_writer summary_message(data);
  for (const auto& [name, number] : record.values) add_scalar(summary_message, name, number);
  add_event(record.time, record.step, data);
}

void EventLog::add(const LayerRecord& record) {
  std::string data;
  pbf_writer summary_message(data);
  add_histogram(summary_message, "weights/" + record.name, record.weights);
  add_histogram(summary_message, "gradients/" + record.name, record.gradients);
  if (!data.empty()) add_event(record.time, record.step, data);
}

void EventLog::add(const EventRecord& event) {
  std::string text = event.text;
  if (!event.culprit.empty()) text += "\n\n" + event.culprit;  // it reads Markdown
  add_text(event.time, event.step, core::str("events/", name(event.kind)), text);
}

void EventLog::add(const ImageRecord& image) {
  std::string data;
  {
    pbf_writer summary_message(data);
    pbf_writer message(summary_message, summary::value);
    message.add_string(value::tag, image.name);
    pbf_writer picture(message, value::image);
    picture.add_int32(image::height, image.height);
    picture.add_int32(image::width, image.width);
    picture.add_int32(image::channels, image.channels);
    picture.add_bytes(image::encoded, image.png);
  }
  add_event(image.time, image.step, data);
}

/// It reads Markdown, in which lines of four spaces are shown as they are.
void EventLog::add(const TextRecord& text) {
  std::string lines = "    ";
  for (const char c : text.text) lines += c == '\n' ? std::string("\n    ") : std::string(1, c);
  add_text(text.time, text.step, text.name, lines);
}

void EventLog::add_hyperparameters(double time,
                                   const std::vector<std::pair<std::string, std::string>>& values) {
  std::string content;
  {
    pbf_writer plugin(content);
    pbf_writer session(plugin, hyperparameters::session_start);
    for (const auto& [key, text] : values) {
      pbf_writer entry(session, hyperparameters::values);
      entry.add_string(hyperparameters::key, key);
      pbf_writer written(entry, hyperparameters::value);
      if (const std::optional<double> number = as_number(text))
        written.add_double(hyperparameters::number, *number);
      else
        written.add_string(hyperparameters::text, text);
    }
    session.add_double(hyperparameters::start_time, time);
  }
  std::string data;
  {
    pbf_writer summary_message(data);
    pbf_writer message(summary_message, summary::value);
    message.add_string(value::tag, "_hparams_/session_start_info");
    pbf_writer metadata_message(message, value::metadata);
    pbf_writer plugin(metadata_message, metadata::plugin_data);
    plugin.add_string(metadata::plugin_name, "hparams");
    plugin.add_bytes(metadata::content, content);
  }
  add_event(time, 0, data);
}

void EventLog::add_text(double time, std::int64_t step, const std::string& tag,
                        const std::string& text) {
  std::string data;
  pbf_writer summary_message(data);
  add_string(summary_message, tag, text);
  add_event(time, step, data);
}

}  // namespace cairn::observe
