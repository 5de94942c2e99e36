#include <algorithm>
#include <cstring>

#include "cairn/core/error.h"
#include "formats/json_text.h"
#include "formats/safetensors/format.h"
#include "io/file_io.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

using LargeJson = nlohmann::json;

template <class... Args>
[[noreturn]] void fail_data(const std::string& path, const Args&... args) {
  core::fail<core::DataError>("safetensors", escaped(core::str(args..., " in '", path, "'")));
}

std::uint64_t unsigned_of(const LargeJson& value, const std::string& path, const std::string& name,
                          const char* what) {
  if (!value.is_number_unsigned()) {
    fail_data(path, "expected non-negative integers as ", what, " of '", name, "', got ",
              printable(value.dump()));
  }
  return value.get<std::uint64_t>();
}

const LargeJson& member(const LargeJson& entry, const char* key, const std::string& path,
                        const std::string& name) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail_data(path, "expected \"", key, "\" of '", name, "', got none");
  return *found;
}

Shape shape_of(const LargeJson& value, const std::string& path, const std::string& name) {
  if (!value.is_array() || value.size() > static_cast<std::size_t>(core::kMaxDims)) {
    fail_data(path, "expected a shape of at most ", core::kMaxDims, " sizes for '", name, "', got ",
              printable(value.dump()));
  }
  Shape shape;
  for (const LargeJson& size : value) {
    const std::uint64_t n = unsigned_of(size, path, name, "shape");
    if (n > INT64_MAX) fail_data(path, "expected sizes below 2^63 for '", name, "', got ", n);
    shape.push_back(static_cast<std::int64_t>(n));
  }
  return shape;
}

// Bytes of the shape, or a DataError where they pass 64 bits.
std::uint64_t bytes_of(const SafetensorsEntry& entry, const std::string& path) {
  std::uint64_t bytes = core::size_of(entry.dtype);
  bool overflow = false;
  for (const std::int64_t size : entry.shape) {
    overflow = overflow || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes);
  }
  if (overflow)
    fail_data(path, "expected a size that fits 64 bits for '", entry.name, "', got ", entry.shape);
  return bytes;
}

SafetensorsEntry parse_entry(const std::string& name, const LargeJson& value,
                             const std::string& path) {
  if (!value.is_object())
    fail_data(path, "expected an object for '", name, "', got ", printable(value.dump()));
  if (value.size() != 3) {
    fail_data(path, "expected dtype, shape and data_offsets of '", name, "', got ",
              printable(value.dump()));
  }
  SafetensorsEntry entry;
  entry.name = name;
  const LargeJson& dtype = member(value, "dtype", path, name);
  if (!dtype.is_string() ||
      !parse_safetensors_dtype(dtype.get_ref<const std::string&>(), entry.dtype)) {
    fail_data(path, "expected a dtype of F16, BF16, F32, F64, I16, I32, I64, U8 or BOOL for '",
              name, "', got ", printable(dtype.dump()));
  }
  entry.shape = shape_of(member(value, "shape", path, name), path, name);
  const LargeJson& offsets = member(value, "data_offsets", path, name);
  if (!offsets.is_array() || offsets.size() != 2) {
    fail_data(path, "expected data_offsets [begin, end] of '", name, "', got ",
              printable(offsets.dump()));
  }
  entry.begin = unsigned_of(offsets[0], path, name, "data_offsets");
  entry.end = unsigned_of(offsets[1], path, name, "data_offsets");
  const std::uint64_t bytes = bytes_of(entry, path);
  if (entry.begin > entry.end || entry.end - entry.begin != bytes) {
    fail_data(path, "expected data_offsets ", bytes, " bytes apart for '", name, "' ", entry.shape,
              " ", entry.dtype, ", got [", entry.begin, ", ", entry.end, "]");
  }
  return entry;
}

SafetensorsMetadata parse_metadata(const LargeJson& value, const std::string& path) {
  SafetensorsMetadata metadata;
  if (!value.is_object())
    fail_data(path, "expected an object as ", kMetadataKey, ", got ", printable(value.dump()));
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      fail_data(path, "expected text as '", key, "' of ", kMetadataKey, ", got ",
                printable(text.dump()));
    }
    metadata.emplace_back(key, text.get<std::string>());
  }
  return metadata;
}

// Sorted by data, the entries must tile [0, data_bytes): no overlap, no hole, nothing beyond the
// end.
void check_tiling(const std::vector<SafetensorsEntry>& entries, std::uint64_t data_bytes,
                  const std::string& path) {
  std::uint64_t at = 0;
  const SafetensorsEntry* last = nullptr;
  const auto before = [&] { return last ? "'" + last->name + "'" : std::string("the header"); };
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin < at) {
      fail_data(path, "expected '", entry.name, "' to start at ", at, " or later, after ", before(),
                ", got an overlap at ", entry.begin);
    }
    if (entry.begin > at) {
      fail_data(path, "expected '", entry.name, "' to start at ", at, ", right after ", before(),
                ", got a hole up to ", entry.begin);
    }
    if (entry.end > data_bytes) {
      fail_data(path, "expected ", entry.end, " bytes of data up to the end of '", entry.name,
                "', got a file truncated to ", data_bytes);
    }
    at = entry.end;
    last = &entry;
  }
  if (at != data_bytes) {
    fail_data(path, "expected the data to end after ", before(), " at ", at, ", got ",
              data_bytes - at, " surplus bytes");
  }
}

// Any other byte in a bool is undefined.
void check_booleans(const Tensor& x, const std::string& path, const std::string& name) {
  const auto* bytes = static_cast<const unsigned char*>(x.raw_data());
  const auto* bad = std::find_if(bytes, bytes + x.nbytes(), [](unsigned char c) { return c > 1; });
  if (bad != bytes + x.nbytes()) {
    fail_data(path, "expected 0 or 1 as elements of '", name, "' BOOL, got ", int{*bad});
  }
}

}  // namespace

class SafetensorsReader::File : public ReadableFile {
  using ReadableFile::ReadableFile;
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : path_(path), file_(std::make_shared<File>(path)), file_bytes_(file_->size()) {
  std::uint64_t length = 0;
  if (file_bytes_ < sizeof length) {
    fail_data(path, "expected at least 8 bytes, got ", file_bytes_);
  }
  file_->read(0, &length, sizeof length);
  if (length > kLargestHeader || length > file_bytes_ - sizeof length) {
    fail_data(path, "expected a header of at most ",
              std::min(kLargestHeader, file_bytes_ - sizeof length), " bytes, got a length of ",
              length);
  }
  std::string text(sizeof length + length, '\0');
  file_->read(0, text.data(), text.size());
  header_checksum_ = checksum(text.data(), text.size());
  text.erase(0, sizeof length);
  const LargeJson header = parse_large_json(text, "safetensors", path);
  if (!header.is_object())
    fail_data(path, "expected an object as header, got ", header.type_name());
  entries_.reserve(header.size());
  for (const auto& [name, value] : header.get_ref<const LargeJson::object_t&>()) {
    if (name == kMetadataKey) {
      metadata_ = parse_metadata(value, path);
    } else {
      entries_.push_back(parse_entry(name, value, path));
    }
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  places_.reserve(entries_.size());
  for (std::size_t i = 0; i < entries_.size(); ++i) places_.emplace(entries_[i].name, i);
  data_begin_ = sizeof length + length;
  check_tiling(entries_, file_bytes_ - data_begin_, path);
}

SafetensorsReader::~SafetensorsReader() = default;

const SafetensorsEntry* SafetensorsReader::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &entries_[found->second];
}

Tensor SafetensorsReader::read(const std::string& name) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) fail_data(path_, "expected a tensor '", name, "', got none of that name");
  return read(*entry);
}

Tensor SafetensorsReader::read(const SafetensorsEntry& entry) const {
  Tensor result = Tensor::empty(entry.shape, entry.dtype, Device{});
  read_into(entry, result);
  return result;
}

void SafetensorsReader::read_into(const SafetensorsEntry& entry, const Tensor& to) const {
  CAIRN_CHECK(to.is_contiguous() && to.shape() == entry.shape && to.dtype() == entry.dtype &&
                  to.device() == Device{},
              "safetensors", "expected a contiguous ", core::name(entry.dtype), entry.shape,
              " on cpu:0 for '", entry.name, "', got ", to.dtype(), to.shape(), " on ",
              to.device());
  file_->read(data_begin_ + entry.begin, to.raw_data(), to.nbytes());
  if (entry.dtype == DType::boolean) check_booleans(to, path_, entry.name);
}

Tensor SafetensorsReader::map(const SafetensorsEntry& entry) const {
  const std::uint64_t offset = data_begin_ + entry.begin;
  const bool aligned = offset % core::size_of(entry.dtype) == 0;
  char* data = aligned ? file_->map(offset, entry.end - entry.begin) : nullptr;
  if (data == nullptr) return read(entry);
  Tensor result = Tensor::wrap(TensorView(data, entry.shape, entry.dtype), file_);
  if (entry.dtype == DType::boolean) check_booleans(result, path_, entry.name);
  return result;
}

}  // namespace cairn::checkpointing
