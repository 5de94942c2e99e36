// What differs between the entries of one update beside their tensors.
#pragma once

#include <cmath>

#include "update_list.h"

namespace cairn::kernels {

/// g = gradient * scale + l2 * w; `inverse` is NovoGrad's 1 / d.
struct EntryScalars {
  float scale, l2, inverse;
};

template <class Options>
double inverse_of(const Options&, double) {
  return 1.0;
}
inline double inverse_of(const NovoGradOptions& o, double norm) {
  return 1.0 / (norm / std::sqrt(o.correction2) + o.eps);
}

template <class Options>
EntryScalars scalars_of(const UpdateItem& item, const Options& options) {
  return {static_cast<float>(options.gradient_scale * item.gradient_factor),
          static_cast<float>(item.l2 + options.l2()),
          static_cast<float>(inverse_of(options, item.norm))};
}

}  // namespace cairn::kernels
