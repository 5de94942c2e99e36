// What a check pass found in an optimizer's gradients, and passes that were launched but not read.
//
// A pass runs on the device; the host waits only in read(), once for all that are read together:
//
//   auto reports =
//       optim::PendingReport::read({g_optimizer.begin_check(), d_optimizer.begin_check()});
//   if (reports[0].finite() && reports[1].finite()) {
//     optim::StepResult g = g_optimizer.update(reports[0], {});
//     optim::StepResult d = d_optimizer.update(reports[1], {});
//   }
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/world.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::optim {

class Optimizer;

using core::NonFinite;

/// Norms of one type (2, p, or infinity: the largest magnitude) of single tensors, by parameter in
/// registration order over all groups; 0 where there is no gradient.
struct ParameterNorms {
  double type = 2.0;
  std::vector<double> values;
};

/// What passes found in an optimizer's gradients and weights, before it is made into a report.
struct FoundChecks {
  using OfParameters = std::vector<std::vector<kernels::CheckedPiece>>;  // in registration order
  std::vector<double> types;            // of norms; the first is the report's norm_type
  std::vector<OfParameters> gradients;  // by type
  OfParameters weights;                 // empty unless the optimizer needs their norms
};

/// What a check found, of the gradients as they lie (scaled). Non-finite elements are left out of
/// the norms.
struct GradientReport {
  double norm_type = 2.0;
  /// Of the norm of all gradients together; NaN: not checked.
  double squared_norm = std::numeric_limits<double>::quiet_NaN();
  std::vector<NonFinite> nonfinite;   // every such parameter, in registration order
  std::string culprit;                // the first of them; empty: all are finite
  std::vector<double> group_norms;    // of norm_type
  std::vector<ParameterNorms> norms;  // of norm_type, then of the types that the optimizer needs
  std::vector<double> weight_norms;   // 2-norms of the weights; empty unless LARC needs them
  /// Where ranks divide gradients and have not told each other yet: what this one found in its
  /// parts. There are no norms then, and `nonfinite` is this rank's.
  std::shared_ptr<const FoundChecks> of_parts;

  bool finite() const { return culprit.empty(); }
  bool checked() const { return !norms.empty(); }
  /// Of norm_type, of all gradients together.
  double norm() const { return std::sqrt(squared_norm); }
  /// By parameter. Throws InvalidArgument where this type was not asked for.
  const std::vector<double>& norms_of(double type) const;
  /// "inf in the gradient of conv1.weight (3 elements)"; empty where finite.
  std::string describe() const;
};

struct ParameterGroup;
/// Of everything: every parameter's pieces make up the whole.
GradientReport make_report(const std::vector<ParameterGroup>& groups, const FoundChecks& found);

/// Passes over an optimizer's gradients that were launched and not read. The optimizer must be
/// there, with the groups that it had, when they are read.
class [[nodiscard]] PendingReport {
 public:
  /// The host waits. Where ranks divide gradients a collective: each has all norms then.
  GradientReport read() const;
  /// Waits once for all of them.
  static std::vector<GradientReport> read(const std::vector<PendingReport>& pending);

 private:
  friend class Optimizer;
  friend class OptimizerAccess;
  /// One norm type, one device, some parameters (by index over all groups).
  struct Pass {
    bool of_weights = false;                   // their 2-norms
    std::size_t type_index = 0;                // in types_
    std::vector<std::size_t> parameters;       // of each tensor checked
    std::vector<core::ElementRange> elements;  // of that parameter
    kernels::PendingCheck check;
  };
  /// What this rank found. Waits once for all of them, and for `others`, whose read() is at once
  /// then.
  static std::vector<GradientReport> read_own(const std::vector<PendingReport>& pending,
                                              std::vector<kernels::PendingCheck> others);
  GradientReport report(const std::vector<kernels::TensorCheck>* found) const;

  const Optimizer* optimizer_ = nullptr;
  std::vector<double> types_;  // of norms that the report has; the first is its norm_type
  bool has_weights_ = false;
  bool divided_ = false;  // ranks have parts of the gradients
  std::vector<Pass> passes_;
};

}  // namespace cairn::optim
