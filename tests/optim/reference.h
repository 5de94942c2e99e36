// The optimizers' formulas in double precision, one parameter at a time.
#pragma once

#include <cmath>
#include <vector>

#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/rmsprop.h"
#include "cairn/optim/sgd.h"
#include "support/training.h"

namespace cairn::optim::reference {

using test::Values;

/// The moments of Adam and LAMB.
struct AdamMoments {
  Values m, v;
  int step = 0;

  /// What an update takes from the weights, times the learning rate. m takes in `share` of the
  /// gradient.
  template <class Options>
  Values update(const Options& options, const Values& w, const Values& gradient, double scale,
                double share) {
    m.resize(w.size()), v.resize(w.size());
    ++step;
    const double c1 = options.bias_correction ? 1 - std::pow(options.beta1, step) : 1.0;
    const double c2 = options.bias_correction ? 1 - std::pow(options.beta2, step) : 1.0;
    Values change(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (!options.adamw) g += options.weight_decay * w[i];
      m[i] = options.beta1 * m[i] + share * g;
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
      change[i] = (m[i] / c1) / (std::sqrt(v[i] / c2) + options.eps);
      if (options.adamw) change[i] += options.weight_decay * w[i];
    }
    return change;
  }
};

struct Adam {
  using Optimizer = FusedAdam;
  AdamOptions options;
  AdamMoments moments;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    const Values change = moments.update(options, w, gradient, scale, 1 - options.beta1);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= options.lr * change[i];
  }
};

struct Sgd {
  using Optimizer = FusedSGD;
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

struct Adagrad {
  using Optimizer = FusedAdagrad;
  AdagradOptions options;
  Values h;
  int step = 0;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    if (h.empty()) h.assign(w.size(), options.initial_accumulator);
    const double lr = options.lr / (1 + step++ * options.lr_decay);
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (!options.adagrad_w) g += options.weight_decay * w[i];
      h[i] += g * g;
      double change = g / (std::sqrt(h[i]) + options.eps);
      if (options.adagrad_w) change += options.weight_decay * w[i];
      w[i] -= lr * change;
    }
  }
};

struct RmsProp {
  using Optimizer = FusedRMSprop;
  RmsPropOptions options;
  Values v, b;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    v.resize(w.size()), b.resize(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = gradient[i] * scale + options.weight_decay * w[i];
      v[i] = options.alpha * v[i] + (1 - options.alpha) * g * g;
      b[i] = options.momentum * b[i] + g / (std::sqrt(v[i]) + options.eps);
      w[i] -= options.lr * b[i];
    }
  }
};

/// total_norm: of the scaled gradients of all tensors together.
struct Lamb {
  using Optimizer = FusedLAMB;
  LambOptions options;
  AdamMoments moments;

  void update(Values& w, const Values& gradient, double scale = 1.0, double total_norm = 0.0) {
    const bool clips = options.max_gradient_norm > 0 && total_norm > options.max_gradient_norm;
    if (clips) scale *= options.max_gradient_norm / total_norm;
    const double share = options.grad_averaging ? 1 - options.beta1 : 1.0;
    const Values change = moments.update(options, w, gradient, scale, share);
    const double w_norm = test::norm_of(w), change_norm = test::norm_of(change);
    const bool adapts = options.weight_decay != 0 || options.use_nvlamb;
    const double ratio = adapts && w_norm > 0 && change_norm > 0 ? w_norm / change_norm : 1.0;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= options.lr * ratio * change[i];
  }
};

struct NovoGrad {
  using Optimizer = FusedNovoGrad;
  NovoGradOptions options;
  Values m;
  double n = 0.0;
  int step = 0;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    m.resize(w.size());
    ++step;
    const double norm = test::norm_of(gradient, options.norm_type) * scale;
    const double b1 = options.beta1, b2 = options.beta2;
    if (step == 1 && !options.init_zero) n = norm;
    n = options.norm_type == 2 ? std::sqrt(b2 * n * n + (1 - b2) * norm * norm)
                               : b2 * n + (1 - b2) * norm;
    const double c1 = options.bias_correction ? 1 - std::pow(b1, step) : 1.0;
    const double c2 = options.bias_correction ? std::sqrt(1 - std::pow(b2, step)) : 1.0;
    const double b3 = options.grad_averaging ? 1 - b1 : 1.0, d = n / c2 + options.eps;
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (options.reg_inside_moment) {
        m[i] = b1 * m[i] + b3 * (g / d + options.weight_decay * w[i]);
        w[i] -= options.lr * m[i] / c1;
      } else {
        m[i] = b1 * m[i] + b3 * g;
        w[i] -= options.lr * (m[i] / c1 / d + options.weight_decay * w[i]);
      }
    }
  }
};

}  // namespace cairn::optim::reference
