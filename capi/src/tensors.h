// What cairn_tensor describes, as views.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cairn.h"
#include "cairn/core/tensor_view.h"

namespace cairn::capi {

/// Throws InvalidArgument, with the tensor's name, for a dtype, a device, sizes or an address that
/// cannot be.
TensorView view_of(const cairn_tensor* tensor, const char* function);
/// `tensors` may be null where count is 0.
std::vector<TensorView> views_of(const cairn_tensor* tensors, std::size_t count,
                                 const char* function);
/// Throws InvalidArgument where it has none.
std::string name_of(const cairn_tensor& tensor, const char* function);
/// "" for null.
inline std::string text_of(const char* text) {
  return text == nullptr ? "" : text;
}

}  // namespace cairn::capi
