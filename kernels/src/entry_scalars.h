// What differs between the entries of one update beside their tensors.
#pragma once

#include <cmath>
#include <vector>

#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

/// g = gradient * scale + l2 * w; `inverse` is NovoGrad's 1 / d.
struct EntryScalars {
  float scale, l2, inverse;
};

// The part of the weight decay that goes into g before the rule.
inline double rule_l2(const AdamOptions& o) {
  return o.adamw ? 0.0 : o.weight_decay;
}
inline double rule_l2(const SgdOptions& o) {
  return o.wd_after_momentum ? 0.0 : o.weight_decay;
}
inline double rule_l2(const AdagradOptions& o) {
  return o.adagrad_w ? 0.0 : o.weight_decay;
}
inline double rule_l2(const LambOptions& o) {
  return o.adamw ? 0.0 : o.weight_decay;
}
inline double rule_l2(const NovoGradOptions&) {
  return 0.0;
}

template <class Options>
double rule_inverse(const Options&, double) {
  return 1.0;
}
inline double rule_inverse(const NovoGradOptions& o, double norm) {
  return 1.0 / (norm / std::sqrt(o.correction2) + o.eps);
}

template <class Options>
EntryScalars scalars_of(const UpdateEntry& entry, const Options& options) {
  return {static_cast<float>(options.gradient_scale * entry.gradient_factor),
          static_cast<float>(entry.l2 + rule_l2(options)),
          static_cast<float>(rule_inverse(options, entry.norm))};
}

}  // namespace cairn::kernels
