#include "tensors.h"

#include <dlpack/dlpack.h>

#include <array>
#include <limits>

#include "cairn/core/device.h"
#include "cairn/core/dlpack.h"
#include "cairn/core/error.h"
#include "cairn/kernels/multi_tensor.h"
#include "guard.h"

namespace cairn::capi {

namespace {

constexpr std::array<DType, 9> kDTypes = {DType::f16, DType::bf16, DType::f32,
                                          DType::f64, DType::i16,  DType::i32,
                                          DType::i64, DType::u8,   DType::boolean};

int32_t code_of(DType dtype) {
  int32_t code = 1;
  for (const DType one : kDTypes) {
    if (one == dtype) return code;
    ++code;
  }
  core::fail("dtype", "expected a dtype of cairn.h, got ", dtype);
}

DType dtype_of(int32_t code, const char* function, const std::string& what) {
  CAIRN_CHECK(code >= 1 && code <= static_cast<int32_t>(kDTypes.size()), function,
              "expected a dtype from 1 (CAIRN_F16) to ", kDTypes.size(), " (CAIRN_BOOL) for ", what,
              ", got ", code);
  return kDTypes[static_cast<std::size_t>(code - 1)];
}

Shape shape_of(const cairn_tensor& tensor, const char* function, const std::string& what) {
  CAIRN_CHECK(tensor.dims >= 0 && tensor.dims <= core::kMaxDims, function, "expected 0 to ",
              core::kMaxDims, " dimensions for ", what, ", got ", tensor.dims);
  if (tensor.dims == 0) return {};
  check_given(tensor.shape, function, ("the shape of " + what).c_str());
  std::int64_t room = std::numeric_limits<std::int64_t>::max() / 8;  // elements that bytes count
  for (int i = 0; i < tensor.dims; ++i) {
    const std::int64_t size = tensor.shape[i];
    CAIRN_CHECK(size >= 0 && size <= room, function, "expected sizes that fit into memory for ",
                what, ", got ", size, " as number ", i);
    if (size > 1) room /= size;
  }
  return Shape(tensor.shape, tensor.shape + tensor.dims);
}

void describe(DLManagedTensor* managed, cairn_tensor* tensor, const char* function) {
  check_given(managed, function, "a DLManagedTensor");
  check_given(tensor, function, "a cairn_tensor");
  DLManagedTensor borrowed = *managed;  // whose end is none
  borrowed.deleter = nullptr;
  const TensorView view = core::from_dlpack(&borrowed).view();
  CAIRN_CHECK(view.is_contiguous(), function, "expected row-major memory without gaps, got shape ",
              view.shape, " with strides ", view.strides);
  *tensor = {nullptr,          view.data,           managed->dl_tensor.shape,
             view.dims(),      code_of(view.dtype), view.device.is_cuda() ? CAIRN_CUDA : CAIRN_CPU,
             view.device.index};
}

struct Measured {
  double norm = 0.0;           // of the finite elements
  std::int64_t nonfinite = 0;  // elements
};
Measured measure(const std::vector<TensorView>& views, double p, const char* function) {
  CAIRN_CHECK(p >= 1, function, "expected p >= 1, got ", p);
  const std::vector<kernels::TensorCheck> found = kernels::check_tensors(views, p).read();
  Measured all{kernels::norm_of(found, p), 0};
  for (const kernels::TensorCheck& check : found) all.nonfinite += check.nonfinite;
  return all;
}

}  // namespace

TensorView view_of(const cairn_tensor* tensor, const char* function) {
  check_given(tensor, function, "a cairn_tensor");
  const std::string what =
      tensor->name == nullptr ? "a tensor" : "'" + std::string(tensor->name) + "'";
  const DType dtype = dtype_of(tensor->dtype, function, what);
  const Shape shape = shape_of(*tensor, function, what);
  CAIRN_CHECK(tensor->device_type == CAIRN_CPU || tensor->device_type == CAIRN_CUDA, function,
              "expected a device type of 0 (CAIRN_CPU) or 1 (CAIRN_CUDA) for ", what, ", got ",
              tensor->device_type);
  const Device device{tensor->device_type == CAIRN_CUDA ? DeviceType::cuda : DeviceType::cpu,
                      tensor->device_index};
  core::check_exists(device);
  CAIRN_CHECK(tensor->data != nullptr || shape.numel() == 0, function, "expected the memory of ",
              what, ", got NULL");
  CAIRN_CHECK(reinterpret_cast<std::uintptr_t>(tensor->data) % size_of(dtype) == 0, function,
              "expected memory aligned to ", size_of(dtype), " bytes for ", what, ", got address ",
              tensor->data);
  return {tensor->data, shape, dtype, device};
}

std::vector<TensorView> views_of(const cairn_tensor* tensors, std::size_t count,
                                 const char* function) {
  if (count > 0) check_given(tensors, function, "tensors");
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < count; ++i) views.push_back(view_of(tensors + i, function));
  return views;
}

std::string name_of(const cairn_tensor& tensor, const char* function) {
  std::string name = text_of(tensor.name);
  CAIRN_CHECK(!name.empty(), function, "expected a name of each tensor, got none");
  return name;
}

extern "C" {

cairn_status cairn_tensor_from_dlpack(DLManagedTensor* managed, cairn_tensor* tensor) {
  return guard(__func__, [&](const char* function) { describe(managed, tensor, function); });
}

cairn_status cairn_tensors_norm(const cairn_tensor* tensors, size_t count, double p, double* norm,
                                int64_t* nonfinite) {
  return guard(__func__, [&](const char* function) {
    check_given(norm, function, "where the norm goes");
    const Measured measured = measure(views_of(tensors, count, function), p, function);
    *norm = measured.norm;
    if (nonfinite != nullptr) *nonfinite = measured.nonfinite;
  });
}

cairn_status cairn_tensors_scale(const cairn_tensor* from, const cairn_tensor* to, size_t count,
                                 double factor) {
  return guard(__func__, [&](const char* function) {
    (void)kernels::multi_tensor_scale(views_of(from, count, function),
                                      views_of(to, count, function), factor);
  });
}

cairn_status cairn_tensors_clip(const cairn_tensor* tensors, size_t count, double max_norm,
                                double p, double* norm) {
  return guard(__func__, [&](const char* function) {
    CAIRN_CHECK(max_norm > 0, function, "expected max_norm > 0, got ", max_norm);
    const std::vector<TensorView> views = views_of(tensors, count, function);
    const Measured measured = measure(views, p, function);
    if (measured.nonfinite > 0)
      core::fail<core::Error>(function, "expected finite elements, got ", measured.nonfinite,
                              " that are inf or NaN");
    if (measured.norm > max_norm)
      (void)kernels::multi_tensor_scale(views, views, max_norm / (measured.norm + 1e-6));
    if (norm != nullptr) *norm = measured.norm;
  });
}

}  // extern "C"

}  // namespace cairn::capi
