#include <cstring>

#include "cairn/data/dataset.h"

namespace cairn::data {

namespace {

Shape sample_shape(const Tensor& tensor) {
  return {tensor.shape().begin() + 1, tensor.shape().end()};
}

void check_batched(const Tensor& tensor, const char* what) {
  CAIRN_CHECK(tensor.dims() >= 1 && tensor.device().is_cpu() && tensor.is_contiguous(),
              "tensor_dataset", "expected contiguous ", what, " [N, ...] on the CPU, got shape ",
              tensor.shape(), ", strides ", tensor.strides(), " on ", tensor.device());
}

void copy_sample(const Tensor& tensor, std::int64_t index, const TensorView& out) {
  const std::size_t bytes =
      static_cast<std::size_t>(sample_shape(tensor).numel()) * size_of(tensor.dtype());
  CAIRN_CHECK(out.nbytes() == bytes && out.dtype == tensor.dtype() && out.is_contiguous(),
              "tensor_dataset", "expected memory for a contiguous ", sample_shape(tensor), " ",
              tensor.dtype(), ", got ", out.shape, " ", out.dtype);
  if (bytes == 0) return;
  const char* data = static_cast<const char*>(tensor.raw_data());
  std::memcpy(out.data, data + static_cast<std::size_t>(index) * bytes, bytes);
}

}  // namespace

TensorDataset::TensorDataset(Tensor inputs, Tensor labels)
    : inputs_(std::move(inputs)), labels_(std::move(labels)) {
  check_batched(inputs_, "inputs");
  if (!labels_) labels_ = Tensor::zeros({inputs_.size(0)}, DType::i64, Device{});
  check_batched(labels_, "labels");
  CAIRN_CHECK(inputs_.size(0) == labels_.size(0), "tensor_dataset", "expected a label for each of ",
              inputs_.size(0), " inputs, got ", labels_.size(0), " labels");
}

SampleSpec TensorDataset::spec() const {
  return {sample_shape(inputs_), inputs_.dtype(), sample_shape(labels_), labels_.dtype()};
}

void TensorDataset::read(std::int64_t index, const TensorView& input,
                         const TensorView& label) const {
  CAIRN_CHECK(index >= 0 && index < size(), "tensor_dataset", "expected a sample below ", size(),
              ", got ", index);
  copy_sample(inputs_, index, input);
  copy_sample(labels_, index, label);
}

}  // namespace cairn::data
