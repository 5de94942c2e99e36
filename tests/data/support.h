// What the tests of data share: hashes, files in a folder of their own, and datasets made for
// checking.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cairn/core/world.h"
#include "cairn/data/dataset.h"
#include "support/expect_error.h"

namespace cairn::data::testing {

using test::expect_error;

inline std::uint64_t fnv1a(const void* data, std::size_t bytes) {
  std::uint64_t value = 0xCBF29CE484222325u;
  for (std::size_t i = 0; i < bytes; ++i) {
    value = (value ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3u;
  }
  return value;
}

inline std::uint64_t fnv1a(const Tensor& x) {
  return fnv1a(x.raw_data(), x.nbytes());
}

inline World rank_of(int rank, int size) {
  World world;
  world.rank = rank;
  world.size = size;
  return world;
}

/// A folder that ends with the test.
class TempFolder {
 public:
  TempFolder() {
    const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(::testing::TempDir()) /
            (std::string("cairn_data_") + test->name() + "_" + std::to_string(::getpid()));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = (path_ / name).string();
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::filesystem::path path_;
};

inline std::string gzip(const std::string& bytes) {
  z_stream stream{};
  deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, bytes.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

}  // namespace cairn::data::testing
