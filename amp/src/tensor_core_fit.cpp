#include "tensor_core_fit.h"

#include <string_view>
#include <utility>
#include <vector>

namespace cairn::amp {

using autograd::OpEvent;

namespace {

using Sizes = std::vector<std::pair<const char*, std::int64_t>>;

// Of the products that the operation makes. Batches do not matter. Nothing: not a product.
Sizes sizes_of(const OpEvent& event) {
  const std::string_view op = event.name;
  const auto shape = [&](std::size_t i) { return event.inputs[i].shape(); };
  if (op == "matmul") {
    const Shape a = shape(0), b = shape(1);
    return {{"M", a[a.dims() - 2]}, {"K", a.back()}, {"N", b.back()}};
  }
  if (op == "linear") {
    const std::int64_t K = shape(1)[1];
    return {{"M", K == 0 ? 0 : shape(0).numel() / K}, {"K", K}, {"N", shape(1)[0]}};
  }
  if (op == "conv2d") {
    return {{"input channels per group", shape(1)[1]}, {"output channels", shape(1)[0]}};
  }
  if (op == "conv_transpose2d") {
    return {{"input channels", shape(1)[0]}, {"output channels per group", shape(1)[1]}};
  }
  if (op == "attention") {
    return {{"T", shape(0)[2]}, {"S", shape(1)[2]}, {"D", shape(0)[3]}};
  }
  if (op == "self_attention") return {{"T", shape(0)[1]}, {"C", shape(0)[2] / 3}};
  return {};
}

}  // namespace

std::optional<std::string> tensor_core_misfit(const OpEvent& event) {
  const Sizes sizes = sizes_of(event);
  if (sizes.empty()) return std::nullopt;
  if (!core::is_half(event.dtype)) return core::str("runs in ", event.dtype);
  std::string odd;
  int count = 0;
  for (const auto& [name, size] : sizes) {
    if (size % 8 == 0) continue;
    odd += core::str(odd.empty() ? "" : ", ", name, " ", size);
    ++count;
  }
  if (odd.empty()) return odd;
  return odd + (count == 1 ? " is no multiple of 8" : " are no multiples of 8");
}

}  // namespace cairn::amp
