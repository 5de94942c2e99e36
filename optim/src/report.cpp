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
void sum_up_norms(const std::vector<ParameterGroup>& groups,
                  const std::vector<kernels::TensorCheck>& checks, GradientReport& report) {
  std::span<const double> norms = report.norms.front().values;
  for (const ParameterGroup& group : groups) {
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

void list_nonfinite(const std::vector<ParameterGroup>& groups,
                    const FoundChecks::OfParameters& found, GradientReport& report) {
  auto next = found.begin();
  for (const ParameterGroup& group : groups) {
    for (const NamedTensor& parameter : group.parameters) {
      NonFinite sum{parameter.name, 0, 0};
      for (const kernels::CheckedPiece& piece : *next++) {
        sum.inf += piece.check.nonfinite - piece.check.nan;
        sum.nan += piece.check.nan;
      }
      if (sum.inf + sum.nan > 0) report.nonfinite.push_back(std::move(sum));
    }
  }
  if (!report.nonfinite.empty()) report.culprit = report.nonfinite.front().parameter;
}

std::vector<kernels::TensorCheck> joined(const FoundChecks::OfParameters& found, double type) {
  std::vector<kernels::TensorCheck> checks;
  checks.reserve(found.size());
  for (const auto& pieces : found) checks.push_back(kernels::join_pieces(pieces, type));
  return checks;
}

std::vector<double> norms_of(const std::vector<kernels::TensorCheck>& checks, double type) {
  std::vector<double> norms;
  norms.reserve(checks.size());
  for (const kernels::TensorCheck& check : checks) norms.push_back(kernels::norm_of({check}, type));
  return norms;
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

GradientReport make_report(const std::vector<ParameterGroup>& groups, const FoundChecks& found) {
  GradientReport report;
  report.norm_type = found.types.front();
  list_nonfinite(groups, found.gradients.front(), report);
  std::vector<std::vector<kernels::TensorCheck>> checks;
  for (std::size_t k = 0; k < found.types.size(); ++k) {
    checks.push_back(joined(found.gradients[k], found.types[k]));
    report.norms.push_back({found.types[k], norms_of(checks[k], found.types[k])});
  }
  if (!found.weights.empty()) report.weight_norms = norms_of(joined(found.weights, 2.0), 2.0);
  sum_up_norms(groups, checks.front(), report);
  return report;
}

GradientReport PendingReport::read() const {
  return read(std::vector<PendingReport>{*this}).front();
}

std::vector<GradientReport> PendingReport::read(const std::vector<PendingReport>& pending) {
  std::vector<GradientReport> reports = read_own(pending, {});
  for (std::size_t i = 0; i < pending.size(); ++i)
    reports[i] = pending[i].optimizer_->complete(reports[i]);
  return reports;
}

std::vector<GradientReport> PendingReport::read_own(const std::vector<PendingReport>& pending,
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
  FoundChecks all{types_, {types_.size(), FoundChecks::OfParameters(count)}, {}};
  if (has_weights_) all.weights.resize(count);
  for (const Pass& pass : passes_) {
    const std::vector<kernels::TensorCheck>& checks = *found++;
    auto& of = pass.of_weights ? all.weights : all.gradients[pass.type_index];
    for (std::size_t k = 0; k < checks.size(); ++k)
      of[pass.parameters[k]].push_back({pass.elements[k], checks[k]});
  }
  if (!divided_) return make_report(optimizer_->groups(), all);
  GradientReport report;
  list_nonfinite(optimizer_->groups(), all.gradients.front(), report);
  report.of_parts = std::make_shared<const FoundChecks>(std::move(all));
  return report;
}

}  // namespace cairn::optim
