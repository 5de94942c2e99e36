// Pictures from files: a folder of classes, as torchvision's ImageFolder reads it.
//
//   data::ImageFolder train("imagenet/train", {.random_resized_crop = true});
//   data::TransformedDataset augmented(train, {data::random_horizontal_flip()});
//   data::ImageFolder validation("imagenet/val");
//
// JPEG (libjpeg-turbo) and PNG (libpng), told apart by their first bytes. Grey, palettes and CMYK
// become RGB, transparency is left out, the camera's orientation is not applied: as Pillow's
// convert("RGB") does. Of PNG files, 16 bits are rounded to 8, which Pillow cuts off, and a gamma
// other than sRGB's is applied, which Pillow ignores.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/data/dataset.h"

namespace cairn::data {

/// [3, H, W] u8, RGB. Throws IoError where the file cannot be read, DataError where it is neither a
/// JPEG nor a PNG, is damaged or ends too early, or has more than 2^27 pixels; both name it.
Tensor read_image(const std::string& path);

struct ImageFolderOptions {
  std::int64_t size = 224;  // pixels of each side of what is read
  /// For training: another part of the picture each time (torchvision's RandomResizedCrop): its
  /// area and its width over its height are drawn from these ranges. A JPEG of which the part is
  /// at least twice `size` is decoded at a half, a quarter or an eighth.
  bool random_resized_crop = false;
  double smallest_area = 0.08, largest_area = 1.0;  // of the picture's
  double smallest_ratio = 3.0 / 4, largest_ratio = 4.0 / 3;
  /// Otherwise: the middle of the picture, whose shorter side is resized to so many pixels first
  /// (Resize, CenterCrop); at least `size`.
  std::int64_t resize = 256;
};

/// Files root/CLASS/.../*.jpg, *.jpeg and *.png: classes and files in the order of their names.
/// Samples: [3, size, size] u8 and the class's number. Pictures are decoded where they are read: in
/// the loader's threads. Resizing is bilinear and antialiased, with Pillow's bits.
class ImageFolder : public Dataset {
 public:
  /// Throws IoError where there is no such folder, DataError where it holds no class or a class
  /// holds no picture, InvalidArgument for options that make no sense.
  explicit ImageFolder(const std::string& root, const ImageFolderOptions& options = {});

  std::int64_t size() const override { return static_cast<std::int64_t>(files_.size()); }
  SampleSpec spec() const override;
  /// Throws what read_image throws.
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override;

  const std::vector<std::string>& classes() const { return classes_; }
  std::string path(std::int64_t index) const;

 private:
  struct File {
    std::string name;  // beneath the class's folder
    std::int32_t label = 0;
  };
  std::string root_;
  ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::vector<File> files_;
};

}  // namespace cairn::data
