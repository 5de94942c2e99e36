// The optimizers' formulas in double precision, one parameter at a time.
#pragma once

#include <cmath>
#include <vector>

#include "cairn/optim/optimizer.h"

namespace cairn::optim::reference {

using Values = std::vector<double>;

struct Adam {
  AdamOptions options;
  Values m, v;
  int step = 0;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    if (m.empty()) m.assign(w.size(), 0.0), v.assign(w.size(), 0.0);
    ++step;
    const double c1 = options.bias_correction ? 1 - std::pow(options.beta1, step) : 1.0;
    const double c2 = options.bias_correction ? 1 - std::pow(options.beta2, step) : 1.0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (!options.adamw) g += options.weight_decay * w[i];
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g;
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
      double change = (m[i] / c1) / (std::sqrt(v[i] / c2) + options.eps);
      if (options.adamw) change += options.weight_decay * w[i];
      w[i] -= options.lr * change;
    }
  }
};

struct Sgd {
  SgdOptions options;
  Values buffer;
  bool first = true;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    buffer.resize(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (!options.wd_after_momentum) g += options.weight_decay * w[i];
      if (options.momentum != 0) {
        buffer[i] = first ? g : options.momentum * buffer[i] + (1 - options.dampening) * g;
        g = options.nesterov ? g + options.momentum * buffer[i] : buffer[i];
      }
      if (options.wd_after_momentum) g += options.weight_decay * w[i];
      w[i] -= options.lr * g;
    }
    first = false;
  }
};

}  // namespace cairn::optim::reference
