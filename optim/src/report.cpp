#include "cairn/optim/report.h"

#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"

namespace cairn::optim {

namespace {

/// The norm of one type of everything, from the norms of its parts.
double combine(const double* norms, std::size_t count, double type) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isinf(type)) {
      sum = std::max(sum, norms[i]);
    } else {
      sum += type == 2.0 ? norms[i] * norms[i] : std::pow(norms[i], type);
    }
  }
  if (std::isinf(type)) return sum;
  return type == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / type);
}

ParameterNorms& table_of(std::vector<ParameterNorms>& tables, double type, std::size_t count) {
  const auto found = std::find_if(tables.begin(), tables.end(),
                                  [&](const ParameterNorms& t) { return t.type == type; });
  if (found != tables.end()) return *found;
  return tables.emplace_back(ParameterNorms{type, std::vector<double>(count, 0.0)});
}

}  // namespace

double GradientReport::norm() const {
  return std::sqrt(squared_norm);
}

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
  return core::str(is_nan ? "NaN" : "inf", " in the gradient of ", culprit, " (", nonfinite_count,
                   nonfinite_count == 1 ? " element)" : " elements)");
}

GradientReport PendingReport::read() const {
  return read(std::vector<PendingReport>{*this}).front();
}

std::vector<GradientReport> PendingReport::read(const std::vector<PendingReport>& pending) {
  std::vector<passes::PendingCheck> checks;
  for (const PendingReport& one : pending) {
    for (const Pass& pass : one.passes_) checks.push_back(pass.check);
  }
  const std::vector<std::vector<passes::TensorCheck>> found = passes::PendingCheck::read(checks);
  std::vector<GradientReport> reports;
  std::size_t next = 0;
  for (const PendingReport& one : pending) {
    reports.push_back(one.report(found.data() + next));
    next += one.passes_.size();
  }
  return reports;
}

GradientReport PendingReport::report(const std::vector<passes::TensorCheck>* found) const {
  std::vector<const std::string*> names;
  for (const ParameterGroup& group : optimizer_->groups()) {
    for (const NamedTensor& parameter : group.parameters) names.push_back(&parameter.name);
  }
  GradientReport report;
  report.norm_type = norm_type_;
  table_of(report.norms, norm_type_, names.size());
  std::vector<passes::TensorCheck> counts(names.size());
  for (const Pass& pass : passes_) {
    const std::vector<passes::TensorCheck>& checks = *found++;
    const bool of_weights = pass.of == Of::weights;
    if (of_weights) report.weight_norms.resize(names.size());
    std::vector<double>& norms = of_weights
                                     ? report.weight_norms
                                     : table_of(report.norms, pass.norm_type, names.size()).values;
    for (std::size_t k = 0; k < checks.size(); ++k) {
      const std::size_t parameter = pass.parameters[k];
      norms[parameter] = passes::norm_of({checks[k]}, pass.norm_type);
      if (!of_weights && pass.norm_type == norm_type_) counts[parameter] = checks[k];
    }
  }

  for (std::size_t i = 0; i < names.size(); ++i) {
    if (counts[i].nonfinite == 0) continue;
    report.nonfinite.push_back({*names[i], counts[i].nonfinite - counts[i].nan, counts[i].nan});
  }
  if (!report.nonfinite.empty()) {
    const NonFinite& first = report.nonfinite.front();
    report.culprit = first.parameter;
    report.is_nan = first.nan > 0;
    report.nonfinite_count = first.inf + first.nan;
  }

  const std::vector<double>& norms = report.norms.front().values;
  std::size_t begin = 0;
  for (const ParameterGroup& group : optimizer_->groups()) {
    const std::size_t count = group.parameters.size();
    report.group_norms.push_back(combine(norms.data() + begin, count, norm_type_));
    begin += count;
  }
  const double norm = combine(norms.data(), norms.size(), norm_type_);
  report.squared_norm = norm * norm;
  return report;
}

}  // namespace cairn::optim
