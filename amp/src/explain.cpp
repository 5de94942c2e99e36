#include "cairn/amp/explain.h"

#include <algorithm>

#include "cairn/autograd/autocast.h"
#include "tensor_core_fit.h"

namespace cairn::amp {

using autograd::CastPolicy;
using autograd::OpEvent;
using autograd::Phase;

namespace {

constexpr std::size_t kMostMisfits = 32;

// "f16, f32", in the order of the inputs.
std::string dtypes_of(std::span<const Tensor> inputs) {
  std::vector<std::string_view> names;
  for (const Tensor& x : inputs) {
    if (!x.defined()) continue;
    const std::string_view dtype = core::name(x.dtype());
    if (std::find(names.begin(), names.end(), dtype) == names.end()) names.push_back(dtype);
  }
  std::string list;
  for (const std::string_view dtype : names)
    list += (list.empty() ? "" : ", ") + std::string(dtype);
  return list;
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

}  // namespace

ExplainRow& Explain::row_of(const OpEvent& event) {
  std::string reason = why(event);
  const auto [entry, added] =
      index_.emplace(Key{event.name, event.phase, event.dtype, reason}, sums_.rows.size());
  if (added) {
    ExplainRow row;
    row.op = event.name, row.phase = event.phase, row.dtype = event.dtype;
    row.why = std::move(reason);
    sums_.rows.push_back(std::move(row));
  }
  return sums_.rows[entry->second];
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
  report.steps = std::max<std::int64_t>(1, steps_);
  return report;
}

}  // namespace cairn::amp
