// What differs between the entries of one update beside their tensors.
#pragma once

#include <cmath>

#include "update_list.h"

namespace cairn::kernels {

/// g = gradient * scale + l2 * w; `of_norm` is NovoGrad's 1 / d, or LAMB's step length.
struct EntryScalars {
  float scale, l2, of_norm;
};

template <class Options>
double of_norm(const Options&, double) {
  return 1.0;
}
inline double of_norm(const NovoGradOptions& o, double norm) {
  return 1.0 / (norm / std::sqrt(o.correction2) + o.eps);
}
inline double of_norm(const LambOptions&, double step) {
  return step;
}

template <class Options>
EntryScalars scalars_of(const UpdateItem& item, const Options& options) {
  return {static_cast<float>(options.gradient_scale * item.gradient_factor),
          static_cast<float>(item.l2 + options.l2()),
          static_cast<float>(of_norm(options, item.norm))};
}

}  // namespace cairn::kernels
