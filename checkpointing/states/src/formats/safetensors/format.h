// What reader and writer of safetensors share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/checkpointing/safetensors.h"

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

/// write_safetensors that returns the checksums.
SafetensorsChecksums write_safetensors_with_checksums(const std::string& path,
                                                      const NamedTensors& tensors,
                                                      const SafetensorsMetadata& metadata);

}  // namespace cairn::checkpointing
