// What reader and writer of safetensors share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

inline constexpr std::uint64_t kLargestHeader =
    100'000'000;  // bytes; the reference implementation's limit
inline constexpr const char* kMetadataKey = "__metadata__";

const char* safetensors_name(DType dtype);  // "F32"
/// False where Cairn has no such dtype.
bool parse_safetensors_dtype(const std::string& text, DType& dtype);

std::uint64_t checksum(const void* data, std::size_t bytes);  // XXH3, 64 bits

/// The same of bytes that come piece by piece.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;
  void add(const void* data, std::size_t bytes);
  std::uint64_t value() const;

 private:
  void* state_;
};

struct SafetensorsChecksums {
  std::uint64_t header = 0;  // of all before the data
  std::vector<std::uint64_t> tensors;
};

/// A tensor of a file, or a rank's part of it.
struct SafetensorsPart {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;    // of all of it
  Tensor values;  // from element `begin` on, in row-major order; undefined: others write it
  std::int64_t begin = 0;  // elements
};

/// Writes one file by all ranks of a world: each the values that it has, which together are all
/// of them. Names, dtypes and shapes are the same on every rank. Where one fails all throw. The
/// checksums are those of this rank's values.
SafetensorsChecksums write_safetensors_parts(const std::string& path,
                                             const std::vector<SafetensorsPart>& parts,
                                             const SafetensorsMetadata& metadata,
                                             const World& world);

/// write_safetensors that returns the checksums.
SafetensorsChecksums write_safetensors_with_checksums(const std::string& path,
                                                      const NamedTensors& tensors,
                                                      const SafetensorsMetadata& metadata);

}  // namespace cairn::checkpointing
