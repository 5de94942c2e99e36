// safetensors: a file of named tensors that stock Python (`safetensors.torch.load_file`) and Cairn
// both read.
//
//   u64 little-endian header length | header, JSON: {"name": {"dtype": "F32", "shape": [2, 3],
//   "data_offsets": [0, 24]}, ...} | data
//
// The reader believes nothing: header length, JSON and its depth, duplicate names, dtypes, shapes
// against offsets, overlaps, holes and the file's length are checked before the first tensor is
// handed out, and every DataError names the file and the entry.
//
//   checkpointing::SafetensorsReader file("model.safetensors");
//   Tensor weight = file.read("fc.weight");
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::checkpointing {

using SafetensorsMetadata = std::vector<std::pair<std::string, std::string>>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the start of the data
};

class SafetensorsReader {
 public:
  /// Reads and checks the header. Throws core::IoError where the file cannot be read,
  /// core::DataError where it is not valid or holds a dtype that Cairn lacks.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  const std::vector<SafetensorsEntry>& entries() const {
    return entries_;
  }                                                                   // in the order of their data
  const SafetensorsMetadata& metadata() const { return metadata_; }   // "__metadata__"
  std::uint64_t header_checksum() const { return header_checksum_; }  // XXH3 of all before the data
  const SafetensorsEntry* find(const std::string& name) const;

  /// A contiguous tensor on cpu:0. Several threads may read at once. Throws core::DataError for a
  /// name the file lacks, core::IoError where reading fails.
  Tensor read(const std::string& name) const;
  Tensor read(const SafetensorsEntry& entry) const;
  /// Into a contiguous tensor on cpu:0 of the entry's shape and dtype.
  void read_into(const SafetensorsEntry& entry, const Tensor& to) const;
  /// The same without a copy, where the system can: the tensor is the file's own pages, which are
  /// read now. What is written to it stays in this process. The file may be removed or replaced by
  /// renaming, but must not be written or cut short while the tensor lives.
  Tensor map(const SafetensorsEntry& entry) const;

 private:
  class File;
  std::string path_;
  std::shared_ptr<File> file_;
  std::uint64_t file_bytes_ = 0;
  std::uint64_t data_begin_ = 0;
  std::uint64_t header_checksum_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string, std::size_t> places_;  // of entries_, by name
  SafetensorsMetadata metadata_;
};

/// Writes the tensors (any device, any dense strides; stored row-major, aligned to their size) and
/// flushes them to the disk. Replaces the file. Throws core::InvalidArgument for an empty, reserved
/// or repeated name, core::IoError where writing fails: the file is then incomplete.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const SafetensorsMetadata& metadata = {});

}  // namespace cairn::checkpointing
