#include "file_bytes.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "cairn/core/error.h"

namespace cairn::data::detail {

namespace {

constexpr std::size_t kChunk = 1 << 20;  // bytes unpacked at a time
constexpr int kGzipOnly = 16 + MAX_WBITS;

bool starts_as_gzip(const std::string& bytes) {
  return bytes.size() >= 2 && bytes[0] == '\x1f' && bytes[1] == '\x8b';
}

class Inflater {
 public:
  Inflater(const std::string& packed, const std::string& path, std::string_view where)
      : packed_(packed), path_(path), where_(where) {
    if (inflateInit2(&stream_, kGzipOnly) != Z_OK) fail_with("zlib did not start");
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  std::string run() {
    std::string out;
    while (true) {
      const int status = step(out);
      if (status == Z_STREAM_END) {
        if (left() == 0) return out;
        if (inflateReset(&stream_) != Z_OK) fail_with("zlib did not start again");
      } else if (status == Z_BUF_ERROR ||
                 (status == Z_OK && left() == 0 && stream_.avail_out > 0)) {
        fail_with("it ends too early");
      } else if (status != Z_OK) {
        fail_with(stream_.msg != nullptr ? stream_.msg : "unknown damage");
      }
    }
  }

 private:
  std::size_t left() const {
    const auto* begin = reinterpret_cast<const Bytef*>(packed_.data());
    return packed_.size() - static_cast<std::size_t>(stream_.next_in - begin);
  }

  // Unpacks up to one chunk more.
  int step(std::string& out) {
    const std::size_t before = out.size();
    out.resize(before + kChunk);
    const auto most = std::size_t{std::numeric_limits<uInt>::max()};
    stream_.avail_in = static_cast<uInt>(std::min(left(), most));
    stream_.next_out = reinterpret_cast<Bytef*>(out.data() + before);
    stream_.avail_out = kChunk;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    out.resize(before + kChunk - stream_.avail_out);
    return status;
  }

  [[noreturn]] void fail_with(const char* what) const {
    core::fail<core::DataError>(where_, "expected a sound gzip stream in '", path_,
                                "', got damage at byte ", packed_.size() - left(), " of ",
                                packed_.size(), ": ", what);
  }

  const std::string& packed_;
  const std::string& path_;
  std::string_view where_;
  z_stream stream_{};
};

}  // namespace

std::string read_file(const std::string& path, std::string_view where) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    core::fail<core::IoError>(where, "expected a file, got the folder '", path, "'");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  if (file) bytes.assign(std::istreambuf_iterator<char>(file), {});
  if (!file || file.bad()) {
    core::fail<core::IoError>(where, "expected a readable file, got '", path,
                              "': ", std::strerror(errno));
  }
  return bytes;
}

std::string read_maybe_gzip(const std::string& path, std::string_view where) {
  std::string bytes = read_file(path, where);
  return starts_as_gzip(bytes) ? Inflater(bytes, path, where).run() : bytes;
}

}  // namespace cairn::data::detail
