// Dataset: a numbered collection of samples, each an input and a label of fixed shape.
//
// A dataset writes a sample into memory that the caller owns, so a loader collates a batch without
// a copy between. Reading is const and must be safe from several threads at once. A data set that
// draws random numbers draws them from core::Generator::current(), which the loader seeds for each
// sample (see loader.h).
//
//   data::TensorDataset set(images, labels);  // [N, 1, 28, 28] u8, [N] i64
//   data::SampleSpec spec = set.spec();       // input [1, 28, 28] u8, label [] i64
#pragma once

#include <cstdint>

#include "cairn/core/tensor.h"

namespace cairn::data {

/// Shape and dtype of one sample. A label of no dimensions is one number.
struct SampleSpec {
  Shape input_shape;
  DType input_dtype = DType::f32;
  Shape label_shape;
  DType label_dtype = DType::i64;
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;  // samples
  virtual SampleSpec spec() const = 0;
  /// Writes sample `index` of [0, size()) into contiguous CPU memory of spec()'s shapes and dtypes.
  virtual void read(std::int64_t index, const TensorView& input, const TensorView& label) const = 0;
};

/// Samples that lie in two tensors.
class TensorDataset : public Dataset {
 public:
  /// inputs [N, ...] and labels [N, ...] of any dtype, on the CPU, contiguous; shared, not copied.
  /// Without labels every label is 0 (i64). Throws InvalidArgument where the sample counts differ.
  explicit TensorDataset(Tensor inputs, Tensor labels = {});

  std::int64_t size() const override { return inputs_.size(0); }
  SampleSpec spec() const override;
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override;

  const Tensor& inputs() const { return inputs_; }  // [N, ...]
  const Tensor& labels() const { return labels_; }  // [N, ...]

 private:
  Tensor inputs_;
  Tensor labels_;
};

}  // namespace cairn::data
