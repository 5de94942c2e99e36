#include "cairn/amp/explain.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cairn/autograd/autocast.h"
#include "cairn/core/text_table.h"

namespace cairn::amp {

using autograd::CastPolicy;
using autograd::OpEvent;
using autograd::Phase;

namespace {

constexpr std::size_t kMostMisfits = 32;

// "f16, f32", in the order of the inputs.
std::string dtypes_of(std::span<const Tensor> inputs) {
  std::vector<std::string> names;
  for (const Tensor& x : inputs) {
    if (!x.defined()) continue;
    const std::string_view dtype = core::name(x.dtype());
    if (std::find(names.begin(), names.end(), dtype) == names.end()) names.emplace_back(dtype);
  }
  return core::joined(names);
}

std::string policy_reason(const OpEvent& event) {
  const autograd::OpRow* row = autograd::find_op(event.name);
  const std::string reason = row != nullptr ? std::string(row->reason) : "";
  switch (event.policy) {
    case CastPolicy::half:
    case CastPolicy::f32:
      return core::str(name(event.policy), reason.empty() ? "" : ": ", reason);
    case CastPolicy::promote:
      return "promote: widest of " + dtypes_of(event.inputs);
    case CastPolicy::banned:
      return "banned in half, and the input is not";
    case CastPolicy::keep:
      return "keep: " + (reason.empty() ? "as its input" : reason);
  }
  return "";
}

std::string why(const OpEvent& event) {
  if (std::string_view(event.name) == "cast") {
    return core::str(event.dtype, " to ", event.outputs[0].dtype());
  }
  if (event.phase == Phase::backward) return "as its forward";
  if (!event.autocast) return "outside autocast";
  if (event.overridden) return core::str("override: ", name(event.policy));
  const bool casts = event.policy == CastPolicy::half || event.policy == CastPolicy::f32;
  if (casts && event.dtype == DType::f64) return "f64 is left alone";
  return policy_reason(event);
}

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
  if (op == "self_attention") return {{"T", shape(0)[1]}, {"C", event.outputs[0].shape()[2]}};
  return {};
}

/// Unset for anything but a product; empty where it runs in half with every size a multiple of 8;
/// else what is in the way.
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

}  // namespace

ExplainRow& Explain::row_of(const OpEvent& event) {
  const std::string reason = why(event);
  auto& rows = sums_.rows;
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const ExplainRow& row) {
    return row.op == event.name && row.phase == event.phase && row.dtype == event.dtype &&
           row.why == reason;
  });
  if (found != rows.end()) return *found;
  return rows.emplace_back(ExplainRow{event.name, event.phase, event.dtype, reason});
}

void Explain::on_end(const OpEvent& event) {
  ExplainRow& row = row_of(event);
  ++row.count;
  row.casts += event.casts;
  row.bytes_cast += event.bytes_cast;
  row.cache_hits += event.cache_hits;
  sums_.cache_hits += event.cache_hits;
  if (std::string_view(event.name) == "cast") {
    ++sums_.casts;
    sums_.bytes_cast += event.bytes_out;
  }
  if (event.phase != Phase::backward) check_product(event, row);
}

void Explain::check_product(const OpEvent& event, ExplainRow& row) {
  const std::optional<std::string> misfit = tensor_core_misfit(event);
  if (!misfit) return;
  ++row.products, ++sums_.products;
  if (misfit->empty()) {
    ++row.tensor_core, ++sums_.tensor_core;
    return;
  }
  const std::string where = event.parameters.empty() ? "" : event.parameters[0].name();
  auto& list = sums_.misfits;
  const auto found = std::find_if(list.begin(), list.end(), [&](const ExplainMisfit& known) {
    return known.op == event.name && known.where == where && known.reason == *misfit;
  });
  if (found != list.end()) {
    ++found->count;
  } else if (list.size() < kMostMisfits) {
    list.push_back({event.name, where, *misfit, 1});
  }
}

ExplainReport Explain::report() const {
  ExplainReport report = sums_;
  report.steps = std::max<std::int64_t>(1, sums_.steps);
  return report;
}

}  // namespace cairn::amp
