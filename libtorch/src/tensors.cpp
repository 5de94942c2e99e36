#include "cairn/libtorch/tensors.h"

#include <array>
#include <memory>
#include <utility>

#include "cairn/core/error.h"
#include "current_stream.h"

namespace cairn::libtorch {

namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 9> kDTypes{{{DType::f16, at::kHalf},
                                                                   {DType::bf16, at::kBFloat16},
                                                                   {DType::f32, at::kFloat},
                                                                   {DType::f64, at::kDouble},
                                                                   {DType::i16, at::kShort},
                                                                   {DType::i32, at::kInt},
                                                                   {DType::i64, at::kLong},
                                                                   {DType::u8, at::kByte},
                                                                   {DType::boolean, at::kBool}}};

Shape shape_of(at::IntArrayRef sizes) {
  return {sizes.begin(), sizes.end()};
}

at::IntArrayRef sizes_of(const Shape& shape) {
  return {shape.begin(), shape.end()};
}

}  // namespace

DType to_cairn(at::ScalarType dtype) {
  for (const auto& [ours, theirs] : kDTypes) {
    if (theirs == dtype) return ours;
  }
  core::fail<core::InvalidArgument>("to_cairn", "expected a dtype that Cairn has, got ",
                                    at::toString(dtype));
}

at::ScalarType to_torch(DType dtype) {
  for (const auto& [ours, theirs] : kDTypes) {
    if (ours == dtype) return theirs;
  }
  core::fail<core::InvalidArgument>("to_torch", "expected a dtype that libtorch has, got ", dtype);
}

core::Device to_cairn(at::Device device) {
  if (device.is_cpu()) return {};
  CAIRN_CHECK(device.is_cuda(), "to_cairn", "expected a tensor on a CPU or CUDA device, got ",
              device.str());
  follow_torchs_streams();
  return {core::DeviceType::cuda, device.index()};
}

at::Device to_torch(core::Device device) {
  if (device.is_cpu()) return at::Device(at::kCPU);
  follow_torchs_streams();
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device.index));
}

Tensor to_cairn(const torch::Tensor& x) {
  CAIRN_CHECK(x.defined(), "to_cairn", "expected a tensor, got an undefined one");
  CAIRN_CHECK(x.layout() == at::kStrided && !x.is_quantized(), "to_cairn",
              "expected a tensor with strides, got one of layout ", core::str(x.layout()));
  const TensorView view(x.data_ptr(), shape_of(x.sizes()), shape_of(x.strides()),
                        to_cairn(x.scalar_type()), to_cairn(x.device()));
  return Tensor::wrap(view, std::make_shared<at::Storage>(x.storage()));
}

torch::Tensor to_torch(const Tensor& x) {
  const TensorView view = x.view();
  const auto keep = [storage = x.storage()](void*) {};
  return at::from_blob(view.data, sizes_of(view.shape), sizes_of(view.strides), keep,
                       at::TensorOptions(to_torch(view.dtype)).device(to_torch(view.device)),
                       to_torch(view.device));
}

}  // namespace cairn::libtorch
