// Pass 2: clipping, the update or the skip.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"

namespace cairn::optim {

namespace {

/// torch's: 1 where the norm is within the bound.
double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1.0;
}

void check_options(const GradientReport& report, const StepOptions& options) {
  CAIRN_CHECK(std::isfinite(options.gradient_scale), "optimizer",
              "expected a finite gradient_scale, got ", options.gradient_scale);
  CAIRN_CHECK(options.max_gradient_norm >= 0, "optimizer",
              "expected a max_gradient_norm >= 0, got ", options.max_gradient_norm);
  if (options.max_gradient_norm == 0) return;
  CAIRN_CHECK(report.checked() && report.norm_type == options.norm_type, "optimizer",
              "expected a report with norms of type ", options.norm_type, " to clip by, got ",
              report.checked() ? core::str("norms of type ", report.norm_type) : "an unchecked one",
              " (begin_check with that norm_type)");
}

[[noreturn]] void fail_nonfinite(const GradientReport& report) {
  core::fail<core::Error>("optimizer", "expected finite gradients, got ", report.describe(),
                          report.nonfinite.size() > 1
                              ? core::str(" and ", report.nonfinite.size() - 1, " more parameters")
                              : "");
}

}  // namespace

StepResult Optimizer::step(const StepOptions& options) {
  GradientReport report;
  if (options.check || options.max_gradient_norm > 0 || options.error_if_nonfinite) {
    report = check(options.norm_type);
  }
  return options.check && !report.finite() ? skip(report, options) : update(report, options);
}

/// The factor of each group's gradients, and what the result says of norms.
StepResult Optimizer::measure(const GradientReport& report, const StepOptions& options,
                              std::vector<double>& scales) const {
  const double unscale = std::abs(options.gradient_scale);
  StepResult result;
  result.gradient_norm = report.norm() * unscale;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const double norm = options.per_group_norm && report.checked() ? report.group_norms[g] * unscale
                                                                   : result.gradient_norm;
    const double coefficient = clip_coefficient(norm, options.max_gradient_norm);
    result.clip_coefficient = std::min(result.clip_coefficient, coefficient);
    scales.push_back(options.gradient_scale * coefficient);
  }
  return result;
}

kernels::UpdateEntry Optimizer::entry_of(std::size_t group, std::size_t index,
                                         const Tensor& gradient, std::size_t moments,
                                         std::vector<Tensor>& temporaries) {
  const Tensor& parameter = groups_[group].parameters[index].tensor;
  core::GradMeta& meta = parameter.meta();
  State& state = state_[group][index];

  kernels::UpdateEntry entry;
  entry.weight = parameter;
  entry.gradient = laid_out_like(parameter, gradient, temporaries);
  if (master_weights_ && core::is_half(parameter.dtype())) {
    if (!meta.master) {
      meta.master = std::make_shared<Tensor>(copy_beside(parameter, parameter, DType::f32));
    }
    entry.master = *meta.master;
  }
  for (std::size_t m = 0; m < moments; ++m) {
    if (state.moments[m].defined()) continue;
    state.moments[m] = empty_beside(parameter, DType::f32);
    kernels::fill(state.moments[m], 0.0);
  }
  if (moments > 0) entry.moment1 = state.moments[0];
  if (moments > 1) entry.moment2 = state.moments[1];
  return entry;
}

void Optimizer::add_to_batches(std::size_t group, std::int64_t step,
                               const kernels::UpdateEntry& entry) {
  const Device device = entry.weight.device;
  auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& other) {
    const bool alike = other.group == group && other.device == device && other.step == step;
    return other.entries.empty() || alike;
  });
  if (batch == batches_.end()) batch = batches_.insert(batch, Batch{});
  batch->group = group;
  batch->device = device;
  batch->step = step;
  batch->entries.push_back(entry);
}

StepResult Optimizer::update(const GradientReport& report, const StepOptions& options) {
  check_options(report, options);
  if (options.error_if_nonfinite && !report.finite()) fail_nonfinite(report);
  std::vector<double> scales;
  const StepResult result = measure(report, options, scales);

  // All memory is there before anything is written.
  std::vector<Tensor> temporaries;
  const std::size_t moments = moment_names().size();
  for (Batch& batch : batches_) batch.entries.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor* gradient = gradient_of(g, i);
      if (gradient == nullptr) continue;
      add_to_batches(g, state_[g][i].steps + 1, entry_of(g, i, *gradient, moments, temporaries));
    }
  }
  for (const Batch& batch : batches_) {
    if (batch.entries.empty()) break;
    update_entries(groups_[batch.group], batch.entries, scales[batch.group], batch.step);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      if (gradient_of(g, i) == nullptr) continue;
      groups_[g].parameters[i].tensor.storage()->bump_version();
      ++state_[g][i].steps;
    }
  }
  ++steps_;
  finish(options);
  return result;
}

StepResult Optimizer::skip(const GradientReport& report, const StepOptions& options) {
  if (options.error_if_nonfinite && !report.finite()) fail_nonfinite(report);
  StepResult result;
  result.applied = false;
  result.culprit = report.culprit;
  result.reason = report.describe();
  finish(options);
  return result;
}

void Optimizer::finish(const StepOptions& options) {
  if (!options.keep_gradients) clear_grad();
  const bool stale =
      std::any_of(arenas_.begin(), arenas_.end(), [](const auto& arena) { return arena->stale(); });
  if (stale) refresh();
}

}  // namespace cairn::optim
