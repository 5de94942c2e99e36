// Transforms: random changes of samples while the loader reads them, in its threads
// (torchvision.transforms.v2: RandomCrop, RandomHorizontalFlip, ColorJitter).
//
// A Transform changes the input of one sample, contiguous CPU memory, in place; shape and dtype
// stay. What it draws comes from Generator::current(), which the loader seeds for each sample and
// epoch (loader.h), so any number of workers and ranks reads the same. A function of your own will
// do; several threads call it at once.
//
//   data::TransformedDataset augmented(
//       train, {data::random_crop({.padding = 2}), data::random_horizontal_flip()});
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cairn/data/dataset.h"

namespace cairn::data {

using Transform = std::function<void(const TensorView& input)>;

/// Another data set whose inputs the transforms change, in their order. Labels, sizes and dtypes
/// are the other's, which must outlive this one.
class TransformedDataset : public Dataset {
 public:
  /// Throws InvalidArgument for an empty function.
  TransformedDataset(const Dataset& dataset, std::vector<Transform> transforms);

  std::int64_t size() const override { return dataset_->size(); }
  SampleSpec spec() const override { return dataset_->spec(); }
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override;

 private:
  const Dataset* dataset_;
  std::vector<Transform> transforms_;
};

// Of images [..., H, W] of any dtype; all channels alike. Each throws InvalidArgument for options
// that make no sense, and where it is applied to a sample of fewer than two dimensions.

struct RandomCropOptions {
  std::int64_t padding = 0;  // zeros on each side, pixels
};
/// A window as large as the image, anywhere in the padded one.
Transform random_crop(const RandomCropOptions& options);
/// Mirrors left and right.
Transform random_horizontal_flip(double probability = 0.5);

/// Each change is a factor of [max(0, 1 - x), 1 + x].
struct ColorJitterOptions {
  double brightness = 0;  // of the pixel
  double contrast = 0;    // of its distance to the image's mean grey
  double saturation = 0;  // of its distance to its own grey
};
/// Of images [3, H, W] u8, RGB; the three in an order that is drawn too. Throws InvalidArgument for
/// another input.
Transform color_jitter(const ColorJitterOptions& options);

}  // namespace cairn::data
