// Writes a zip archive of stored entries, each aligned so that its bytes can be mapped, with zip64
// records where they are needed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/zip/format.h"
#include "formats/zip/reader.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

class ZipWriter {
 public:
  /// Sizes and offsets from `limit` on stand in zip64 records.
  explicit ZipWriter(const std::string& path, std::uint64_t limit = zip::kIn64);

  void add(const std::string& name, std::string_view bytes);
  void close();  // writes the table of contents and flushes to the disk

 private:
  struct Written {
    ZipEntry entry;
    std::uint64_t header = 0;  // its offset
  };
  void write(std::string_view bytes);
  std::uint32_t short_value(std::uint64_t value) const;  // or the mark of a zip64 record

  WritableFile file_;
  std::uint64_t limit_;
  std::uint64_t at_ = 0;
  std::vector<Written> written_;
};

}  // namespace cairn::checkpointing
