// What is kept beside parameters, in their layout.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/file_memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/optim/partition.h"

namespace cairn::optim {

using kernels::copy_beside;
using kernels::copy_by_blocks;
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

/// How a moment is kept, and where.
struct StateForm {
  DType dtype = DType::f32;
  kernels::StatePlace place = {};

  bool wants_file(const Tensor& state) const {
    return !place.folder.empty() && state.nbytes() >= core::kLeastInFile;
  }
};

/// State of a parameter: laid out like it, or [n] of its part. Uninitialised.
inline Tensor empty_state(const Tensor& parameter, const OwnedRange& part, const StateForm& form) {
  const Shape shape = part ? Shape{part->size()} : parameter.shape();
  const Strides strides = part ? Strides{1} : parameter.strides();
  return kernels::empty_in(form.place, shape, strides, form.dtype, parameter.device());
}

/// The same, filled with one value.
inline Tensor full_state(const Tensor& parameter, const OwnedRange& part, const StateForm& form,
                         double value) {
  const Tensor state = empty_state(parameter, part, form);
  const bool in_file = core::lies_in_file(state);
  if (in_file && value == 0.0) return state;  // as files begin
  const std::int64_t block = in_file ? kernels::kFileBlock : state.numel();
  for (std::int64_t begin = 0; begin < state.numel(); begin += block) {
    const TensorView run = kernels::run_of(state, begin, std::min(begin + block, state.numel()));
    kernels::fill(run, value);
    core::leave_to_file(run);
  }
  return state;
}

/// The same with these values (of the parameter's shape, or of its part), converted.
inline Tensor copy_state(const Tensor& parameter, const OwnedRange& part, const Tensor& values,
                         const StateForm& form) {
  const Tensor state = empty_state(parameter, part, form);
  const bool is_whole = values.shape() == parameter.shape();
  if (!part || !is_whole) {
    copy_by_blocks(values, state);
  } else {
    const Tensor whole = values.is_contiguous() ? values
                                                : copy_beside(parameter, values, values.dtype(),
                                                              core::MemoryCategory::workspace);
    copy_by_blocks(core::part_of(whole, *part), state);
  }
  if (values.device() != state.device()) {  // the host writes there next, or lets go of it
    const Device gpu = values.device().is_cuda() ? values.device() : state.device();
    core::Stream::current(gpu).synchronize();
  }
  return state;
}

}  // namespace cairn::optim
