#include "cairn/data/idx.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <vector>

#include "file_bytes.h"

namespace cairn::data {

namespace {

namespace fs = std::filesystem;
using core::DataError;
using core::fail;

constexpr const char* kReadIdx = "read_idx";
constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;  // a larger header is damage, not data

struct Header {
  DType dtype = DType::u8;
  Shape shape;
  std::size_t bytes = 0;  // of the header itself
};

std::uint32_t big_endian(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i)
    value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return value;
}

DType dtype_of_code(unsigned code, const std::string& path) {
  switch (code) {
    case 0x08:
      return DType::u8;
    case 0x0C:
      return DType::i32;
    case 0x0D:
      return DType::f32;
    case 0x0E:
      return DType::f64;
    case 0x09:
    case 0x0B:
      fail<core::Unsupported>(kReadIdx, "expected elements of type u8, i32, f32 or f64 in '", path,
                              "', got ", code == 0x09 ? "i8" : "i16", " (convert the file)");
    default:
      fail<DataError>(kReadIdx, "expected an IDX element type (8, 9, 11-14) in '", path, "', got ",
                      code);
  }
}

Header parse_header(const std::string& bytes, const std::string& path) {
  const auto byte = [&](std::size_t i) {
    return static_cast<unsigned>(static_cast<unsigned char>(bytes[i]));
  };
  if (bytes.size() < 4 || byte(0) != 0 || byte(1) != 0) {
    fail<DataError>(kReadIdx,
                    "expected an IDX file (two zero bytes, element type, dimensions) in '", path,
                    "', got ",
                    bytes.size() < 4 ? core::str(bytes.size(), " bytes")
                                     : core::str("bytes ", byte(0), " ", byte(1)),
                    " (is it another format?)");
  }
  Header header{dtype_of_code(byte(2), path), {}, 4 + 4 * std::size_t{byte(3)}};
  if (byte(3) < 1 || byte(3) > static_cast<unsigned>(core::kMaxDims)) {
    fail<DataError>(kReadIdx, "expected 1 to ", core::kMaxDims, " dimensions in '", path, "', got ",
                    byte(3));
  }
  if (bytes.size() < header.bytes) {
    fail<DataError>(kReadIdx, "expected a header of ", header.bytes, " bytes in '", path,
                    "', got a file of ", bytes.size(), " (truncated)");
  }
  for (unsigned i = 0; i < byte(3); ++i)
    header.shape.push_back(big_endian(bytes, 4 + 4 * std::size_t{i}));
  return header;
}

std::size_t data_bytes(const Header& header, const std::string& path) {
  auto bytes = static_cast<std::int64_t>(size_of(header.dtype));
  for (std::int64_t size : header.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes) || bytes > kMostBytes) {
      fail<DataError>(kReadIdx, "expected a size that fits memory in '", path, "', got ",
                      header.shape, " ", header.dtype);
    }
  }
  return static_cast<std::size_t>(bytes);
}

// IDX stores elements big-endian.
void swap_bytes(char* data, std::size_t bytes, std::size_t width) {
  if (width == 1 || std::endian::native == std::endian::big) return;
  for (std::size_t i = 0; i < bytes; i += width) std::reverse(data + i, data + i + width);
}

// ---- image sets

Tensor checked_images(const std::string& path) {
  Tensor images = read_idx(path);
  if (images.dims() != 3 || images.dtype() != DType::u8) {
    fail<DataError>("read_image_set", "expected images [N, H, W] u8 in '", path, "', got ",
                    images.shape(), " ", images.dtype());
  }
  return images;
}

Tensor checked_labels(const std::string& path, std::int64_t classes) {
  const Tensor raw = read_idx(path);
  if (raw.dims() != 1 || raw.dtype() != DType::u8) {
    fail<DataError>("read_image_set", "expected labels [N] u8 in '", path, "', got ", raw.shape(),
                    " ", raw.dtype());
  }
  Tensor labels = Tensor::empty(raw.shape(), DType::i64, Device{});
  const auto* in = raw.data<std::uint8_t>();
  auto* out = labels.data<std::int64_t>();
  for (std::int64_t i = 0; i < raw.numel(); ++i) {
    out[i] = in[i];
    if (out[i] < classes) continue;
    fail<DataError>("read_image_set", "expected labels below ", classes, " in '", path, "', got ",
                    out[i], " at ", i);
  }
  return labels;
}

std::vector<std::string> names_of(const std::string& set, const char* kind, int dims) {
  const std::string base = set + "-" + kind, type = core::str("idx", dims, "-ubyte");
  return {base + "-" + type, base + "-" + type + ".gz", base + "." + type,
          base + "." + type + ".gz"};
}

/// The first of the names that the folder holds, or "".
std::string find_in(const std::string& folder, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const fs::path path = fs::path(folder) / name;
    if (fs::exists(path)) return path.string();
  }
  return "";
}

std::string find_images(const std::string& folder, const std::string& set) {
  return find_in(folder, names_of(set, "images", 3));
}

ImageSet read_set(const std::string& folder, const std::string& set, std::int64_t classes) {
  const std::string images = find_images(folder, set);
  const std::vector<std::string> label_names = names_of(set, "labels", 1);
  const std::string labels = find_in(folder, label_names);
  if (labels.empty()) {
    fail<core::IoError>("read_image_folder", "expected '", label_names[0], "' (or .gz) beside '",
                        images, "', got no such file");
  }
  return read_image_set(images, labels, classes);
}

void check_folder(const std::string& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    fail<core::IoError>("read_image_folder", "expected a folder, got '", folder, "'");
  }
  if (find_images(folder, "train").empty() && find_images(folder, "t10k").empty()) {
    fail<core::IoError>("read_image_folder",
                        "expected train-images-idx3-ubyte or t10k-images-idx3-ubyte (or .gz) in '",
                        folder, "', got neither");
  }
}

Tensor rows(const Tensor& x, std::int64_t begin, std::int64_t end) {
  return x.alias(x.view().slice(0, begin, end));
}

ImageSet slice(const ImageSet& set, std::int64_t begin, std::int64_t end) {
  return {rows(set.images, begin, end), rows(set.labels, begin, end)};
}

}  // namespace

Tensor read_idx(const std::string& path) {
  const std::string bytes = detail::read_maybe_gzip(path, kReadIdx);
  const Header header = parse_header(bytes, path);
  const std::size_t expected = data_bytes(header, path), got = bytes.size() - header.bytes;
  if (got != expected) {
    fail<DataError>(kReadIdx, "expected ", expected, " bytes of data (", header.shape, " ",
                    header.dtype, ") in '", path, "', got ", got,
                    got < expected ? " (truncated)" : " (surplus bytes)");
  }
  Tensor result = Tensor::empty(header.shape, header.dtype, Device{});
  if (expected == 0) return result;
  char* data = static_cast<char*>(result.raw_data());
  std::memcpy(data, bytes.data() + header.bytes, expected);
  swap_bytes(data, expected, size_of(header.dtype));
  return result;
}

ImageSet read_image_set(const std::string& image_path, const std::string& label_path,
                        std::int64_t classes) {
  ImageSet set{checked_images(image_path), checked_labels(label_path, classes)};
  if (set.images.size(0) != set.labels.size(0)) {
    fail<DataError>("read_image_set", "expected a label for each of the ", set.images.size(0),
                    " images of '", image_path, "', got ", set.labels.size(0), " in '", label_path,
                    "'");
  }
  return set;
}

ImageSet read_test_folder(const std::string& folder, std::int64_t classes) {
  check_folder(folder);
  return read_set(folder, find_images(folder, "t10k").empty() ? "train" : "t10k", classes);
}

ImageSplit read_image_folder(const std::string& folder, std::int64_t holdout,
                             std::int64_t classes) {
  check_folder(folder);
  const bool has_train = !find_images(folder, "train").empty();
  const bool has_test = !find_images(folder, "t10k").empty();
  if (has_train && has_test)
    return {read_set(folder, "train", classes), read_set(folder, "t10k", classes)};
  const ImageSet all = read_set(folder, has_train ? "train" : "t10k", classes);
  CAIRN_CHECK(holdout > 0 && holdout < all.size(), "read_image_folder",
              "expected a holdout of 1 to ", all.size() - 1, " test images, since '", folder,
              "' has only one image set, got ", holdout);
  return {slice(all, 0, all.size() - holdout), slice(all, all.size() - holdout, all.size())};
}

TensorDataset image_dataset(const ImageSet& set) {
  const Shape& shape = set.images.shape();
  CAIRN_CHECK(shape.dims() == 3, "image_dataset", "expected images [N, H, W], got ", shape);
  return TensorDataset(
      set.images.alias(set.images.view().reshape({shape[0], 1, shape[1], shape[2]})), set.labels);
}

}  // namespace cairn::data
