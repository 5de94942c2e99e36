// IDX, the file format of MNIST and its relatives: a big-endian header with the element type and
// the sizes, then the elements. Files may be compressed with gzip, whatever their name. Format:
// yann.lecun.com/exdb/mnist.
//
// A damaged file (wrong magic number, truncated, surplus bytes, bad gzip stream, label out of
// range, counts that differ) throws DataError that names the file, what was expected and what was
// found; a file that cannot be read throws IoError.
#pragma once

#include <cstdint>
#include <string>

#include "cairn/data/dataset.h"

namespace cairn::data {

/// Reads a whole file into a contiguous CPU tensor of u8, i32, f32 or f64.
Tensor read_idx(const std::string& path);

/// images [N, H, W] u8, labels [N] i64 in [0, classes).
struct ImageSet {
  Tensor images;
  Tensor labels;
  std::int64_t size() const { return images.size(0); }
};

inline constexpr std::int64_t kMnistClasses = 10;

/// Reads an image file and its label file.
ImageSet read_image_set(const std::string& image_path, const std::string& label_path,
                        std::int64_t classes = kMnistClasses);

/// Reads a folder that serves as a test set: its one image set, or the test set (t10k) where it has
/// both. The files have MNIST's names, {train,t10k}-images-idx3-ubyte and
/// {train,t10k}-labels-idx1-ubyte, with or without .gz, or with ".idx" for "-idx".
ImageSet read_test_folder(const std::string& folder, std::int64_t classes = kMnistClasses);

struct ImageSplit {
  ImageSet train;
  ImageSet test;
};
/// Reads a folder's training and test sets. Where it has only one set, the last `holdout` images of
/// it become the test set, and holdout must be less than their number; where it has both, holdout
/// is not used.
ImageSplit read_image_folder(const std::string& folder, std::int64_t holdout = 0,
                             std::int64_t classes = kMnistClasses);

/// The set as samples of input [1, H, W] u8 and label i64. The tensors are shared, not copied.
TensorDataset image_dataset(const ImageSet& set);

}  // namespace cairn::data
