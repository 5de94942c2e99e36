// The container of PyTorch's files: a zip archive of stored (uncompressed) entries, zip64 or not.
//
// Read by code of our own because tensors are to be mapped: zip libraries hand out copies and do
// not tell where an entry's bytes lie. What PyTorch writes needs no decompression.
//
// The reader believes nothing: every size and offset is checked against the file before it is used,
// entries must not overlap, and every core::DataError names the byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::checkpointing {

struct ZipEntry {
  std::string name;
  std::uint64_t offset = 0;  // of its bytes, in the file
  std::uint64_t size = 0;
  std::uint32_t crc32 = 0;
};

class ZipReader {
 public:
  /// `bytes` is the whole file and must live as long; `path` is for messages. Throws
  /// core::DataError.
  ZipReader(std::string_view bytes, const std::string& path);

  const std::vector<ZipEntry>& entries() const { return entries_; }  // in the order of their bytes
  const ZipEntry* find(std::string_view name) const;                 // nullptr where there is none
  std::string_view bytes_of(const ZipEntry& entry) const;
  /// Whether its bytes have the checksum that the archive states.
  bool intact(const ZipEntry& entry) const;

 private:
  std::string_view bytes_;
  std::vector<ZipEntry> entries_;
  std::vector<std::size_t> by_name_;
};

/// CRC-32 as in zip archives.
std::uint32_t zip_crc32(std::string_view bytes);

}  // namespace cairn::checkpointing
