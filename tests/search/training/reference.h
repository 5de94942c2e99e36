// Training as a textbook has it: every weight, moment and gradient is a double of its own. It knows
// nothing of arenas, slots, masters, buckets, segments or of the order in which a program does its
// work: what the library does is compared with it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace cairn::stateful {

using Values = std::vector<double>;

enum class Kind { sgd, adam, adagrad, lamb, novograd, rmsprop };

/// What an optimizer does, and to whom: SGD and RMSprop with or without momentum, AdamW, Adagrad,
/// LAMB, NovoGrad.
struct Rule {
  Kind kind = Kind::sgd;
  double momentum = 0.0;  // SGD's and RMSprop's
  double lr = 0.125;
  double decay = 0.0;       // L2 for SGD, Adagrad and RMSprop; decoupled for the others
  bool larc = false;        // within LARC
  bool two_groups = false;  // parameters with odd numbers, at half the rate

  /// Numbers that it keeps beside a weight.
  int moments() const {
    if (kind == Kind::sgd) return momentum > 0 ? 1 : 0;
    if (kind == Kind::rmsprop) return momentum > 0 ? 2 : 1;
    return kind == Kind::adagrad ? 1 : 2;
  }
};

inline double norm_of(const Values& values) {
  double sum = 0.0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

/// To so many significant bits, halves to even; exponents as far as f32 has them.
inline double rounded_to(double x, int bits, int least_exponent = -126) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), least_exponent);
  const double unit = std::ldexp(1.0, exponent - bits + 1);
  return std::nearbyint(x / unit) * unit;
}
inline double rounded_to_bf16(double x) {
  return rounded_to(x, 8);
}
inline double rounded_to_f16(double x) {
  return rounded_to(x, 11, -14);
}

/// What a part of the model makes of its matrix w, its vector v and coefficients c.
///   linear:  sum of c_i w_i, and of others times v
///   product: sum of c_i v_i w_i, with v_i = 1 where v has no such element
///   tanh:    the same with tanh(v_i / 4)
///   norm:    over samples k, sum of d_k c_i n_ki w_i, n: the batch norm of x_ki v_i + z_ki;
///            c_i w_i where v has no such element
enum class Form { linear, product, tanh, norm };

/// Of the last.
struct NormBatch {
  static constexpr std::size_t kSamples = 4;
  static constexpr double kEps = 0.5, kMomentum = 0.5;
  static double x(std::size_t k, std::size_t i, int rank) {
    constexpr std::array<double, 5> values{1.0, -2.0, 0.5, 3.0, -1.5};
    return values[(k + 2 * i + static_cast<std::size_t>(rank)) % values.size()];
  }
  static double z(std::size_t k, std::size_t i, int rank) {
    constexpr std::array<double, 7> values{0.5, -1.0, 2.0, 1.5, -0.25, -2.5, 1.0};
    return values[(2 * k + i + 3 * static_cast<std::size_t>(rank)) % values.size()];
  }
  static double d(std::size_t k, int rank) {
    constexpr std::array<double, 4> values{1.0, -0.5, 2.0, 0.25};
    return values[(k + static_cast<std::size_t>(rank)) % values.size()];
  }
};

/// Of product and tanh by w and by v, at these values.
inline Values matrix_gradient(Form form, Values c, const Values& v) {
  for (std::size_t i = 0; i < v.size(); ++i) {
    c[i] *= form == Form::tanh ? std::tanh(v[i] / 4) : v[i];
  }
  return c;
}
inline Values vector_gradient(Form form, const Values& c, const Values& w, const Values& v) {
  Values gradient;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double t = std::tanh(v[i] / 4);
    gradient.push_back(c[i] * w[i] * (form == Form::tanh ? (1 - t * t) / 4 : 1.0));
  }
  return gradient;
}

/// What has come since the gradient was last cleared.
struct Gradient {
  std::vector<Values> of_rank;  // of each rank's own losses, summed; empty: there is none
  bool plain = false;           // some of it by a backward without amp
  bool scaled = false;          // some of it by amp, at a scale other than 1

  bool exists() const { return !of_rank.empty(); }
  /// Values of losses are never 0.
  bool is_on(int rank) const {
    return exists() && of_rank[static_cast<std::size_t>(rank)].front() != 0.0;
  }
  Values mean() const {
    Values mean(of_rank.front().size(), 0.0);
    for (const Values& own : of_rank) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        mean[i] += own[i] / static_cast<double>(of_rank.size());
      }
    }
    return mean;
  }
  void scale(double factor) {
    for (Values& own : of_rank) {
      for (double& g : own) g *= factor;
    }
  }
  bool finite() const {
    if (!exists()) return true;
    const Values all = mean();
    return std::all_of(all.begin(), all.end(), [](double g) { return std::isfinite(g); });
  }
  /// Whether amp puts it down to a loss that shares the gradient, and skips all optimizers of that
  /// loss, is its choice.
  bool plain_overflow() const { return plain && !finite(); }
};

struct Parameter {
  Values weight, first, second;  // moments; second: NovoGrad's running norm, RMSprop's momentum
  Values raw;                    // the weight as a forward sees it
  int group = 0;                 // of its optimizer; -1: one that was added
  int updates = 0;
  int optimizer = -1;  // -1: none yet
  bool driven = true;  // by the optimizer's schedule (a group that was added is not)
  bool trainable = true;
  Gradient gradient;

  /// coefficient: of clipping. The moments that stay are rounded to bf16 where that is asked for;
  /// the weight has used them before, but for LAMB's. raw_norm: LARC measures the weight as a
  /// forward sees it, bf16.
  void update(const Rule& rule, double lr, double coefficient, bool bf16_moments, bool raw_norm) {
    Values g = gradient.mean();
    for (double& x : g) x *= coefficient;
    ++updates;
    const double decay = rule.larc ? 0.0 : rule.decay;
    if (rule.larc) adapt(g, rule, lr, norm_of(raw_norm ? raw : weight));
    first.resize(g.size(), 0.0);
    second.resize(rule.kind == Kind::novograd ? 1 : g.size(), 0.0);
    if (rule.kind == Kind::sgd) sgd(g, rule, lr, decay);
    if (rule.kind == Kind::adagrad) adagrad(g, lr, decay);
    if (rule.kind == Kind::rmsprop) rmsprop(g, rule, lr, decay);
    if (rule.kind == Kind::adam) adam(g, lr, decay);
    if (rule.kind == Kind::lamb) lamb(g, lr, decay, bf16_moments);
    if (rule.kind == Kind::novograd) novograd(g, lr, decay);
    if (bf16_moments) round_moments(rule);
    if (!raw_norm) return;
    raw = weight;
    for (double& w : raw) w = rounded_to_bf16(w);
  }

 private:
  /// LARC: the weight decay is in the gradient.
  void adapt(Values& g, const Rule& rule, double lr, double w) const {
    const double n = norm_of(g);
    if (w == 0 || n == 0) return;
    const double ratio = std::min(0.02 * w / (n + rule.decay * w + 1e-8) / lr, 1.0);
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = ratio * (g[i] + rule.decay * weight[i]);
  }
  void sgd(const Values& g, const Rule& rule, double lr, double decay) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      first[i] = rule.momentum * first[i] + g[i] + decay * weight[i];
      weight[i] -= lr * first[i];
    }
  }
  void adagrad(const Values& g, double lr, double decay) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double whole = g[i] + decay * weight[i];
      first[i] += whole * whole;
      weight[i] -= lr * whole / (std::sqrt(first[i]) + 1e-10);
    }
  }
  void rmsprop(const Values& g, const Rule& rule, double lr, double decay) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double whole = g[i] + decay * weight[i];
      first[i] = 0.99 * first[i] + 0.01 * whole * whole;
      second[i] = rule.momentum * second[i] + whole / (std::sqrt(first[i]) + 1e-8);
      weight[i] -= lr * second[i];
    }
  }
  void round_moments(const Rule& rule) {
    for (double& m : first) m = rounded_to_bf16(m);
    if (rule.kind == Kind::novograd) return;
    for (double& v : second) v = rounded_to_bf16(v);
  }
  void average(const Values& g) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      first[i] = 0.9 * first[i] + 0.1 * g[i];
      second[i] = 0.999 * second[i] + 0.001 * g[i] * g[i];
    }
  }
  Values direction(double eps, double decay) const {
    Values all;
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const double m = first[i] / (1 - std::pow(0.9, updates));
      const double v = second[i] / (1 - std::pow(0.999, updates));
      all.push_back(m / (std::sqrt(v) + eps) + decay * weight[i]);
    }
    return all;
  }
  void adam(const Values& g, double lr, double decay) {
    average(g);
    const Values u = direction(1e-8, decay);
    for (std::size_t i = 0; i < g.size(); ++i) weight[i] -= lr * u[i];
  }
  /// As long as the weight, in a direction from the moments as they are stored.
  void lamb(const Values& g, double lr, double decay, bool bf16_moments) {
    average(g);
    if (bf16_moments) round_moments({.kind = Kind::lamb});
    const Values u = direction(1e-6, decay);
    const double w = norm_of(weight), d = norm_of(u);
    const double stretch = decay != 0 && w != 0 && d != 0 ? w / d : 1.0;
    for (std::size_t i = 0; i < g.size(); ++i) weight[i] -= lr * stretch * u[i];
  }
  void novograd(const Values& g, double lr, double decay) {
    const double n = norm_of(g);
    second[0] = updates == 1 ? n : std::sqrt(0.999 * second[0] * second[0] + 0.001 * n * n);
    const double divisor = second[0] / std::sqrt(1 - std::pow(0.999, updates)) + 1e-8;
    for (std::size_t i = 0; i < g.size(); ++i) {
      first[i] = 0.9 * first[i] + 0.1 * g[i];
      const double m = first[i] / (1 - std::pow(0.9, updates));
      weight[i] -= lr * (m / divisor + decay * weight[i]);
    }
  }
};

/// A loss scale: halves at an overflow, doubles after two clean steps.
struct Scale {
  static constexpr double kMax = 256.0;
  static constexpr int kInterval = 2;
  bool dynamic = false;
  double value = 1.0;
  int clean = 0;
  bool carried = false;  // an overflow that a later step's scale shall hear of
  bool known = true;     // false: what it has heard of was the library's choice

  void update(bool overflow) {
    if (!dynamic || !known) return;
    clean = overflow ? 0 : clean + 1;
    if (overflow) value = std::max(1.0, value / 2);
    if (clean == kInterval) {
      value = std::min(kMax, value * 2);
      clean = 0;
    }
  }
  /// Where the count is not known, the next change tells it.
  void follow(double seen) {
    if (known || seen == value) return;
    *this = {dynamic, seen};
  }
};

/// Backwards of a loss whose gradients are on their way to a step.
struct Pending {
  int loss = 0;
  unsigned given = 0;       // the optimizers that were named with the loss, a bit each
  unsigned optimizers = 0;  // that have gradients of it, a bit each
  bool overflow = false;
  bool delayed = false;   // its scale hears of the overflow later
  bool doubtful = false;  // cleared, or broken off: whether it counts is the library's choice
};

enum class Answer { no, yes, either };

/// Of weights: running, by halves, or equal.
struct Average {
  bool equal = false;
  int updates = 0;
  std::vector<Values> values;

  void update(const std::vector<Parameter>& parameters) {
    values.resize(parameters.size());
    const double kept = equal ? updates / (updates + 1.0) : 0.5;
    for (std::size_t p = 0; p < values.size(); ++p) {
      const Values& weight = parameters[p].weight;
      if (updates == 0) values[p] = weight;
      for (std::size_t i = 0; i < weight.size(); ++i) {
        values[p][i] = kept * values[p][i] + (1 - kept) * weight[i];
      }
    }
    ++updates;
  }
};

struct State {  // what a file holds
  std::vector<Parameter> parameters;
  std::vector<Scale> scales;
  std::vector<int> positions;  // of the schedules
  std::optional<Average> average;
};

/// Running ones of batch norms: mean and variance of each channel of a, and of b.
struct Statistics {
  std::array<Values, 2> mean, var;
};

struct Reference : State {
  std::vector<Statistics> statistics;  // by rank
  std::vector<Rule> rules;
  bool bf16_moments = false;
  bool raw_norms = false;  // LARC's, of half weights whose masters are remainders
  std::vector<Pending> pending;
  std::vector<Answer> skips;  // by optimizer: a loss that reaches it overflowed in another's step
  bool unreduced = false;     // the ranks' gradients are their own
  bool summed = false;  // with average = false: some gradient was reduced, which none may add to
  bool may_refuse = false;    // a backward that added broke off: all may refuse until it is cleared
  bool ranks_differ = false;  // in what unreduced losses reach: those that a partial clear() leaves

  /// Backwards of one loss that was given to the same optimizers are judged as one.
  void add_pending(const Pending& more) {
    const auto same = std::find_if(pending.begin(), pending.end(), [&](const Pending& one) {
      return one.loss == more.loss && one.given == more.given;
    });
    if (same == pending.end()) {
      if (more.optimizers != 0) pending.push_back(more);
      return;
    }
    same->optimizers |= more.optimizers;
    same->overflow = same->overflow || more.overflow;
    same->doubtful = same->doubtful || more.doubtful || same->delayed != more.delayed;
    same->delayed = more.delayed;
  }
  double lr(int optimizer, bool driven) const {
    const auto o = static_cast<std::size_t>(optimizer);
    return rules[o].lr * (driven ? std::pow(0.5, positions[o] / 2) : 1.0);  // step_decay(2, 0.5)
  }
  template <class F>
  void each_of(unsigned optimizers, F f) {
    for (Parameter& p : parameters) {
      if (p.optimizer >= 0 && (optimizers >> p.optimizer & 1U) != 0) f(p);
    }
  }
  bool any_gradient(unsigned optimizers) {
    bool any = false;
    each_of(optimizers, [&](Parameter& p) { any = any || (p.trainable && p.gradient.exists()); });
    return any;
  }
  /// The optimizers that have gradients, a bit each.
  unsigned with_gradients() {
    unsigned all = 0;
    for (unsigned bit = 1; bit >> rules.size() == 0; bit <<= 1) all |= any_gradient(bit) ? bit : 0;
    return all;
  }
  /// Of the gradients that an optimizer's step would use.
  double norm(unsigned optimizer) {
    double sum = 0.0;
    each_of(optimizer, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      for (const double g : p.gradient.mean()) sum += g * g;
    });
    return std::sqrt(sum);
  }
  /// What was found in gradients that are gone goes with them, unless others of the same loss are
  /// left.
  void clear(unsigned optimizers) {
    bool plain_overflow = false;
    each_of(optimizers, [&](Parameter& p) {
      plain_overflow = plain_overflow || p.gradient.plain_overflow();
      p.gradient = {};
    });
    for (Pending& loss : pending) {
      if ((loss.optimizers & optimizers) == 0) continue;
      loss.doubtful = true;
      loss.overflow = loss.overflow || plain_overflow;
      loss.optimizers &= ~optimizers;
    }
    std::erase_if(pending, [](const Pending& loss) { return loss.optimizers == 0; });
    for (std::size_t o = 0; o < skips.size(); ++o) {
      if ((optimizers >> o & 1U) != 0) skips[o] = Answer::no;
    }
  }
  /// A parameter with a gradient was frozen: nothing else of its optimizer's need be of a loss that
  /// it has.
  void doubt_losses_of(const Parameter& frozen) {
    if (!frozen.gradient.exists() || frozen.optimizer < 0) return;
    for (Pending& loss : pending) {
      const bool has_it = (loss.optimizers >> frozen.optimizer & 1U) != 0;
      loss.doubtful = loss.doubtful || has_it;
    }
    Answer& skip = skips[static_cast<std::size_t>(frozen.optimizer)];
    if (skip == Answer::yes) skip = Answer::either;
  }
  void forget_pending() {
    for (Parameter& p : parameters) p.gradient = {};
    pending.clear();
    std::fill(skips.begin(), skips.end(), Answer::no);
    for (Scale& scale : scales) scale.carried = false;
    may_refuse = false;
    ranks_differ = false;
  }
  void load(const State& file) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool trainable = parameters[i].trainable;
      parameters[i] = file.parameters[i];
      parameters[i].trainable = trainable;
    }
    positions = file.positions;
    average = file.average;
    for (std::size_t i = 0; i < scales.size(); ++i) {
      if (scales[i].dynamic && file.scales[i].dynamic) scales[i] = file.scales[i];
    }
    forget_pending();
  }
  /// What they have heard of since was the library's choice.
  void doubt_scales(const std::vector<Scale>& before) {
    scales = before;
    for (Scale& scale : scales) scale.known = false;
  }
  /// The losses of these optimizers end: which of the optimizers must skip. known: no doubt was
  /// left about what the scales hear.
  std::vector<Answer> judge(unsigned optimizers, bool& known) {
    for (std::size_t id = 0; id < scales.size(); ++id) {
      bool overflow = false, concerned = false, delayed = false;
      for (const Pending& loss : pending) {
        if (loss.loss != static_cast<int>(id) || (loss.optimizers & optimizers) == 0) continue;
        known = known && !loss.doubtful && (!concerned || delayed == loss.delayed);
        concerned = true;
        overflow = overflow || loss.overflow;
        delayed = loss.delayed;
      }
      if (!concerned) continue;
      if (delayed) {
        scales[id].carried = scales[id].carried || overflow;
      } else {
        scales[id].update(overflow || scales[id].carried);
        scales[id].carried = false;
      }
    }
    for (const Pending& loss : pending) {
      if ((loss.optimizers & optimizers) == 0 || !loss.overflow) continue;
      for (std::size_t o = 0; o < skips.size(); ++o) {
        if ((loss.optimizers >> o & 1U) == 0 || skips[o] == Answer::yes) continue;
        skips[o] = loss.doubtful ? Answer::either : Answer::yes;
      }
    }
    std::erase_if(pending, [&](const Pending& l) { return (l.optimizers & optimizers) != 0; });
    std::vector<Answer> now = skips;
    for (std::size_t o = 0; o < skips.size(); ++o) {
      if ((optimizers >> o & 1U) != 0) skips[o] = Answer::no;
    }
    return now;
  }
  double norm_of_group(int optimizer, int group) {
    double sum = 0.0;
    each_of(1U << optimizer, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists() || p.group != group) return;
      for (const double g : p.gradient.mean()) sum += g * g;
    });
    return std::sqrt(sum);
  }
  /// per_group: each group is clipped by its own norm.
  void update(int optimizer, double max_norm, bool per_group = false) {
    const unsigned bit = 1U << optimizer;
    const Rule& rule = rules[static_cast<std::size_t>(optimizer)];
    const double of_all = norm(bit);
    const auto coefficient = [&](const Parameter& p) {
      const double n = per_group ? norm_of_group(optimizer, p.group) : of_all;
      return max_norm > 0 && n > max_norm ? max_norm / (n + 1e-6) : 1.0;
    };
    double clipped = 0.0;
    each_of(bit, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      const double n = coefficient(p) * norm_of(p.gradient.mean());
      clipped += n * n;
    });
    const bool bounded = rule.kind == Kind::lamb && clipped > 1.0;
    const double bound = bounded ? 1.0 / std::sqrt(clipped) : 1.0;
    each_of(bit, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      const double rate = lr(optimizer, p.driven) * (p.group == 1 ? 0.5 : 1.0);
      p.update(rule, rate, coefficient(p) * bound, bf16_moments, raw_norms);
    });
  }
};

}  // namespace cairn::stateful
