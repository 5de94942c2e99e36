// A whole file as memory, read when it is touched. Writes to the memory stay private to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace cairn::checkpointing {

class MappedFile {
 public:
  /// Throws core::IoError naming the path and the system's reason.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  char* data() const { return data_; }  // null for an empty file
  std::string_view bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  char* data_ = nullptr;
};

}  // namespace cairn::checkpointing
