// What is kept beside parameters, in their layout.
#pragma once

#include <set>
#include <string>

#include "cairn/core/error.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/optim/partition.h"

namespace cairn::optim {

using kernels::copy_beside;
using kernels::empty_with_layout_of;
using kernels::laid_out_like;

/// Of what is trained or averaged ("parameters", "weights").
inline void check_dense_float(const char* where, const char* what, const NamedTensor& one) {
  const auto& [name, tensor] = one;
  CAIRN_CHECK(!name.empty(), where, "expected ", what, " with names, got an empty name");
  CAIRN_CHECK(tensor.defined(), where, "expected a tensor '", name, "', got an undefined one");
  CAIRN_CHECK(core::is_half(tensor.dtype()) || tensor.dtype() == DType::f32, where, "expected ",
              what, " of f16, bf16 or f32, got '", name, "' of ", tensor.dtype());
  const TensorView layout(nullptr, tensor.shape(), tensor.strides(), tensor.dtype());
  CAIRN_CHECK(layout.is_dense(), where, "expected dense ", what, ", got '", name, "' with shape ",
              tensor.shape(), " and strides ", tensor.strides());
}

/// Refuses a tensor, or a name, that came before.
class EachOnce {
 public:
  void add(const char* where, const char* what, const NamedTensor& one) {
    const bool is_new = names_.insert(one.name).second && tensors_.insert(one.tensor.id()).second;
    CAIRN_CHECK(is_new, where, "expected each ", what, " once, got '", one.name, "' again");
  }

 private:
  std::set<std::string> names_;
  std::set<const void*> tensors_;
};

/// Of a view laid out like the parameter.
inline TensorView in_part(const TensorView& x, const OwnedRange& part) {
  return part ? core::part_of(x, *part) : x;
}

/// State of a parameter: laid out like it, or [n] of its part. Uninitialised.
inline Tensor empty_state(const Tensor& parameter, const OwnedRange& part, DType dtype) {
  if (!part) return empty_with_layout_of(parameter, dtype);
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  return Tensor::empty({part->size()}, dtype, parameter.device());
}

/// The same, filled with one value.
inline Tensor full_state(const Tensor& parameter, const OwnedRange& part, DType dtype,
                         double value) {
  const Tensor state = empty_state(parameter, part, dtype);
  kernels::fill(state, value);
  return state;
}

/// The same with these values (of the parameter's shape, or of its part), converted.
inline Tensor copy_state(const Tensor& parameter, const OwnedRange& part, const Tensor& values,
                         DType dtype) {
  const Tensor state = empty_state(parameter, part, dtype);
  const bool is_whole = values.shape() == parameter.shape();
  if (!part || !is_whole) {
    kernels::copy(values, state);
  } else {
    const Tensor whole =
        copy_beside(parameter, values, values.dtype(), core::MemoryCategory::workspace);
    kernels::copy(core::part_of(whole, *part), state);
  }
  return state;
}

}  // namespace cairn::optim
