#include "cairn/data/idx.h"

#include <array>
#include <bit>

#include "real_data.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

using core::DataError;
using core::IoError;

std::string big_endian(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

std::string idx(char type, const std::vector<std::uint32_t>& sizes, const std::string& data) {
  std::string bytes{'\0', '\0', type, static_cast<char>(sizes.size())};
  for (std::uint32_t size : sizes) bytes += big_endian(size);
  return bytes + data;
}

std::string counting(std::size_t n) {
  std::string bytes(n, '\0');
  for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<char>(i);
  return bytes;
}

// `n` images of 2 x 3 pixels and labels 0, 1, 2 ...
std::string images_of(std::uint32_t n) {
  return idx(8, {n, 2, 3}, counting(std::size_t{n} * 6));
}
std::string labels_of(std::uint32_t n) {
  return idx(8, {n}, counting(n));
}

TEST(ReadIdx, ReadsBytesPlainAndPacked) {
  const TempFolder folder;
  const std::string bytes = idx(8, {2, 3, 2}, counting(12));
  for (const std::string& path : {folder.write("a", bytes), folder.write("b.gz", gzip(bytes))}) {
    const Tensor x = read_idx(path);
    EXPECT_EQ(x.shape(), (Shape{2, 3, 2}));
    EXPECT_EQ(x.dtype(), DType::u8);
    EXPECT_EQ(x.to_vector()[11], 11.0);
  }
}

TEST(ReadIdx, ReadsSeveralGzipMembers) {
  const TempFolder folder;
  const std::string bytes = idx(8, {12}, counting(12));
  const Tensor x = read_idx(folder.write("a", gzip(bytes.substr(0, 9)) + gzip(bytes.substr(9))));
  EXPECT_EQ(x.to_vector()[11], 11.0);
}

TEST(ReadIdx, ReadsBigEndianNumbers) {
  const TempFolder folder;
  const Tensor whole =
      read_idx(folder.write("i32", idx(0x0C, {2}, big_endian(7) + big_endian(~0u))));
  EXPECT_EQ(whole.dtype(), DType::i32);
  EXPECT_EQ(whole.to_vector(), (std::vector<double>{7, -1}));
  const std::string one_and_half = big_endian(std::bit_cast<std::uint32_t>(1.5f));
  EXPECT_EQ(read_idx(folder.write("f32", idx(0x0D, {1}, one_and_half))).to_vector(),
            std::vector<double>{1.5});
  const auto bits = std::bit_cast<std::uint64_t>(-2.25);
  const std::string wide = big_endian(static_cast<std::uint32_t>(bits >> 32)) +
                           big_endian(static_cast<std::uint32_t>(bits));
  EXPECT_EQ(read_idx(folder.write("f64", idx(0x0E, {1}, wide))).to_vector(),
            std::vector<double>{-2.25});
}

TEST(ReadIdx, ReadsEmptySets) {
  const TempFolder folder;
  EXPECT_EQ(read_idx(folder.write("a", idx(8, {0, 28, 28}, ""))).shape(), (Shape{0, 28, 28}));
}

TEST(ReadIdx, NamesWhatIsWrong) {
  const TempFolder folder;
  const auto expect_damage = [&](const std::string& name, const std::string& bytes,
                                 std::vector<std::string> texts) {
    texts.push_back(folder.path() + "/" + name);
    expect_error<DataError>([&] { read_idx(folder.write(name, bytes)); }, texts);
  };
  expect_damage("empty", "", {"0 bytes"});
  expect_damage("png", "\x89PNG....", {"two zero bytes", "137 80"});
  expect_damage("type", idx(7, {1}, "x"), {"element type", "got 7"});
  expect_damage("dims", idx(8, {}, "x"), {"1 to 8 dimensions", "got 0"});
  expect_damage("header", idx(8, {1, 2}, "").substr(0, 9), {"header of 12 bytes", "9"});
  expect_damage("short", idx(8, {2, 3}, "12345"),
                {"expected 6 bytes", "[2, 3] u8", "got 5 (truncated)"});
  expect_damage("long", idx(8, {2, 3}, "1234567"), {"expected 6 bytes", "got 7 (surplus bytes)"});
  expect_damage("huge", idx(8, {~0u, ~0u, ~0u}, ""), {"fits memory", "4294967295"});
  expect_error<core::Unsupported>([&] { read_idx(folder.write("i16", idx(0x0B, {1}, "12"))); },
                                  {"i16"});
  expect_error<IoError>([&] { read_idx(folder.path() + "/absent"); }, {"absent", "No such file"});
  expect_error<IoError>([&] { read_idx(folder.path()); }, {"folder"});
}

TEST(ReadIdx, NamesDamagedGzip) {
  const TempFolder folder;
  const std::string packed = gzip(idx(8, {300}, counting(300)));
  std::string flipped = packed;
  flipped[packed.size() / 2] ^= 0x55;
  std::string checksum = packed;
  checksum[packed.size() - 6] ^= 1;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"cut", packed.substr(0, packed.size() - 5)},
      {"head", packed.substr(0, 2)},
      {"flipped", flipped},
      {"checksum", checksum},
      {"tail", packed + "tail"}};
  for (const auto& [name, bytes] : cases) {
    expect_error<DataError>(
        [&, &name = name, &bytes = bytes] { read_idx(folder.write(name, bytes)); },
        {"gzip", folder.path() + "/" + name, "at byte"});
  }
}

TEST(ReadImageFolder, ReadsBothSetsUnderEveryName) {
  const TempFolder folder;
  folder.write("train-images-idx3-ubyte.gz", gzip(images_of(5)));
  folder.write("train-labels.idx1-ubyte", labels_of(5));
  folder.write("t10k-images.idx3-ubyte", images_of(3));
  folder.write("t10k-labels-idx1-ubyte", labels_of(3));
  // Both sets are there, so nothing is held out.
  const ImageSplit split = read_image_folder(folder.path(), 2);
  EXPECT_EQ(split.train.size(), 5);
  EXPECT_EQ(split.test.size(), 3);
  EXPECT_EQ(split.test.labels.to_vector(), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(read_test_folder(folder.path()).size(), 3);
}

TEST(ReadImageFolder, HoldsOutTheLastOfASingleSet) {
  const TempFolder folder;
  folder.write("t10k-images-idx3-ubyte", images_of(5));
  folder.write("t10k-labels-idx1-ubyte", labels_of(5));
  const ImageSplit split = read_image_folder(folder.path(), 2);
  EXPECT_EQ(split.train.labels.to_vector(), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(split.test.labels.to_vector(), (std::vector<double>{3, 4}));
  EXPECT_EQ(split.test.images.shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(split.test.images.to_vector()[0], 18.0);
  EXPECT_EQ(read_test_folder(folder.path()).size(), 5);
  expect_error<core::InvalidArgument>([&] { read_image_folder(folder.path(), 0); },
                                      {"1 to 4", "got 0"});
  expect_error<core::InvalidArgument>([&] { read_image_folder(folder.path(), 5); },
                                      {"1 to 4", "got 5"});
}

TEST(ReadImageFolder, NamesWhatIsMissing) {
  const TempFolder folder;
  expect_error<IoError>([&] { read_image_folder(folder.path() + "/absent"); },
                        {"folder", "absent"});
  expect_error<IoError>([&] { read_image_folder(folder.path()); },
                        {"train-images-idx3-ubyte", folder.path()});
  folder.write("train-images-idx3-ubyte", images_of(5));
  expect_error<IoError>([&] { read_image_folder(folder.path(), 1); }, {"train-labels-idx1-ubyte"});
}

TEST(ReadImageSet, ChecksTheSet) {
  const TempFolder folder;
  const std::string images = folder.write("images", images_of(12)),
                    labels = folder.write("labels", labels_of(10));
  expect_error<DataError>([&] { read_image_set(images, labels); },
                          {"12 images", images, "got 10", labels});
  const std::string many = folder.write("many", labels_of(12));
  expect_error<DataError>([&] { read_image_set(images, many); },
                          {"below 10", many, "got 10 at 10"});
  EXPECT_EQ(read_image_set(images, many, 12).size(), 12);
  expect_error<DataError>([&] { read_image_set(labels, labels); }, {"[N, H, W]", "[10]"});
  expect_error<DataError>([&] { read_image_set(images, images); }, {"labels [N] u8", "[12, 2, 3]"});
}

TEST(ImageDataset, AddsTheChannel) {
  const TempFolder folder;
  const ImageSet set =
      read_image_set(folder.write("images", images_of(4)), folder.write("labels", labels_of(4)));
  const TensorDataset dataset = image_dataset(set);
  EXPECT_EQ(dataset.spec().input_shape, (Shape{1, 2, 3}));
  EXPECT_EQ(dataset.inputs().raw_data(), set.images.raw_data());
}

TEST(RealMnist, IsRead) {
  const std::string folder = real_data("mnist");
  if (folder.empty()) GTEST_SKIP() << kNoRealData;
  const ImageSet set = read_test_folder(folder);
  EXPECT_EQ(set.images.shape(), (Shape{10000, 28, 28}));
  std::array<int, 10> counts{};
  for (std::int64_t label : set.labels.to_vector<std::int64_t>())
    ++counts.at(static_cast<std::size_t>(label));
  EXPECT_EQ(counts, (std::array<int, 10>{980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009}));
  EXPECT_EQ(set.labels.data<std::int64_t>()[0], 7);
  const ImageSplit split = read_image_folder(folder, 2000);
  EXPECT_EQ(split.train.size(), 8000);
  EXPECT_EQ(split.test.size(), 2000);
}

}  // namespace
}  // namespace cairn::data::testing
