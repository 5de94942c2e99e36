// The optimizers' formulas in double precision, one parameter at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/sgd.h"

namespace cairn::optim::reference {

using Values = std::vector<double>;

struct Adam {
  using Optimizer = FusedAdam;
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

/// total_norm: of the scaled gradients of all tensors together.
struct Lamb {
  using Optimizer = FusedLAMB;
  LambOptions options;
  Values m, v;
  int step = 0;

  void update(Values& w, const Values& gradient, double scale = 1.0, double total_norm = 0.0) {
    if (m.empty()) m.assign(w.size(), 0.0), v.assign(w.size(), 0.0);
    ++step;
    const bool clips = options.max_gradient_norm > 0 && total_norm > options.max_gradient_norm;
    if (clips) scale *= options.max_gradient_norm / total_norm;
    const double b1 = options.beta1, b2 = options.beta2;
    const double c1 = options.bias_correction ? 1 - std::pow(b1, step) : 1.0;
    const double c2 = options.bias_correction ? 1 - std::pow(b2, step) : 1.0;
    Values u(w.size());
    double w_norm = 0.0, u_norm = 0.0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = gradient[i] * scale;
      if (!options.adamw) g += options.weight_decay * w[i];
      m[i] = b1 * m[i] + (options.grad_averaging ? 1 - b1 : 1.0) * g;
      v[i] = b2 * v[i] + (1 - b2) * g * g;
      u[i] = (m[i] / c1) / (std::sqrt(v[i] / c2) + options.eps);
      if (options.adamw) u[i] += options.weight_decay * w[i];
      w_norm += w[i] * w[i];
      u_norm += u[i] * u[i];
    }
    const bool adapts = options.weight_decay != 0 || options.use_nvlamb;
    const double ratio =
        adapts && w_norm > 0 && u_norm > 0 ? std::sqrt(w_norm) / std::sqrt(u_norm) : 1.0;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= options.lr * ratio * u[i];
  }
};

struct NovoGrad {
  using Optimizer = FusedNovoGrad;
  NovoGradOptions options;
  Values m;
  double n = 0.0;
  int step = 0;

  void update(Values& w, const Values& gradient, double scale = 1.0) {
    if (m.empty()) m.assign(w.size(), 0.0);
    ++step;
    double norm = 0.0;
    for (const double x : gradient) {
      norm = options.norm_type == 2 ? norm + x * x * scale * scale
                                    : std::max(norm, std::abs(x * scale));
    }
    if (options.norm_type == 2) norm = std::sqrt(norm);
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
