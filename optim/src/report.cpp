#include "cairn/optim/report.h"

#include <cmath>
#include <span>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"

namespace cairn::optim {

namespace {

/// The norm of one type of everything, from the norms of its parts.
double combine(std::span<const double> norms, double type) {
  std::vector<kernels::TensorCheck> parts;
  for (const double norm : norms) {
    const double power = type == 2.0 ? norm * norm : std::pow(norm, type);
    parts.push_back({.power_sum = std::isinf(type) ? norm : power});
  }
  return kernels::norm_of(parts, type);
}

/// The squares add up in registration order, as find_nonfinite adds them on the device.
void sum_up_norms(const Optimizer& optimizer, const std::vector<kernels::TensorCheck>& checks,
                  GradientReport& report) {
  std::span<const double> norms = report.norms.front().values;
  for (const ParameterGroup& group : optimizer.groups()) {
    const std::size_t count = group.parameters.size();
    report.group_norms.push_back(combine(norms.first(count), report.norm_type));
    norms = norms.subspan(count);
  }
  if (report.norm_type == 2.0) {
    report.squared_norm = 0.0;
    for (const kernels::TensorCheck& check : checks) report.squared_norm += check.power_sum;
    return;
  }
  const double norm = combine(report.group_norms, report.norm_type);
  report.squared_norm = norm * norm;
}

}  // namespace

const std::vector<double>& GradientReport::norms_of(double type) const {
  for (const ParameterNorms& table : norms) {
    if (table.type == type) return table.values;
  }
  core::fail("optimizer", "expected a report with norms of type ", type, ", got ",
             checked() ? core::str("one with norms of type ", norm_type) : "an unchecked one",
             " (begin_check with that norm_type)");
}

std::string GradientReport::describe() const {
  if (finite()) return {};
  const auto& [name, inf, nan] = nonfinite.front();
  return core::str(nan > 0 ? "NaN" : "inf", " in the gradient of ", name, " (", inf + nan,
                   inf + nan == 1 ? " element)" : " elements)");
}

GradientReport PendingReport::read() const {
  return read(std::vector<PendingReport>{*this}).front();
}

std::vector<GradientReport> PendingReport::read(const std::vector<PendingReport>& pending,
                                                std::vector<kernels::PendingCheck> others) {
  std::vector<kernels::PendingCheck> checks;
  for (const PendingReport& one : pending) {
    for (const Pass& pass : one.passes_) checks.push_back(pass.check);
  }
  checks.insert(checks.end(), others.begin(), others.end());
  const std::vector<std::vector<kernels::TensorCheck>> found = kernels::PendingCheck::read(checks);
  std::vector<GradientReport> reports;
  std::size_t next = 0;
  for (const PendingReport& one : pending) {
    reports.push_back(one.report(found.data() + next));
    next += one.passes_.size();
  }
  return reports;
}

GradientReport PendingReport::report(const std::vector<kernels::TensorCheck>* found) const {
  const std::size_t count = optimizer_->parameters_.size();
  GradientReport report;
  report.norm_type = types_.front();
  for (const double type : types_) {
    report.norms.push_back({type, std::vector<double>(count, 0.0)});
  }
  if (has_weights_) report.weight_norms.resize(count);
  std::vector<kernels::TensorCheck> counts(count);
  for (const Pass& pass : passes_) {
    const std::vector<kernels::TensorCheck>& checks = *found++;
    const double type = pass.of_weights ? 2.0 : types_[pass.type_index];
    std::vector<double>& norms =
        pass.of_weights ? report.weight_norms : report.norms[pass.type_index].values;
    for (std::size_t k = 0; k < checks.size(); ++k) {
      const std::size_t parameter = pass.parameters[k];
      norms[parameter] = kernels::norm_of({checks[k]}, type);
      if (!pass.of_weights && pass.type_index == 0) counts[parameter] = checks[k];
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto [power_sum, nonfinite, nan] = counts[i];
    if (nonfinite == 0) continue;
    report.nonfinite.push_back({optimizer_->parameters_[i].name, nonfinite - nan, nan});
  }
  if (!report.nonfinite.empty()) report.culprit = report.nonfinite.front().parameter;
  sum_up_norms(*optimizer_, counts, report);
  return report;
}

}  // namespace cairn::optim
