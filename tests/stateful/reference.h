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

/// What an optimizer does: SGD, with or without momentum, or Adam (AdamW without decay).
struct Rule {
  bool adam = false;
  double momentum = 0.0;
  double lr = 0.125;
};

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
  Values weight, first, second;  // second: Adam's
  int updates = 0;
  int optimizer = -1;  // -1: none yet
  bool driven = true;  // by the optimizer's schedule (a group that was added is not)
  bool trainable = true;
  Gradient gradient;

  void update(const Rule& rule, double lr, double coefficient) {
    const Values g = gradient.mean();
    ++updates;
    first.resize(g.size(), 0.0);
    second.resize(g.size(), 0.0);
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double gradient_i = g[i] * coefficient;
      if (!rule.adam) {
        first[i] = rule.momentum * first[i] + gradient_i;
        weight[i] -= lr * first[i];
        continue;
      }
      first[i] = 0.9 * first[i] + 0.1 * gradient_i;
      second[i] = 0.999 * second[i] + 0.001 * gradient_i * gradient_i;
      const double m = first[i] / (1 - std::pow(0.9, updates));
      const double v = second[i] / (1 - std::pow(0.999, updates));
      weight[i] -= lr * m / (std::sqrt(v) + 1e-8);
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

struct State {  // what a file holds
  std::vector<Parameter> parameters;
  std::vector<Scale> scales;
  std::vector<int> positions;  // of the schedules
};

struct Reference : State {
  std::vector<Rule> rules;
  std::vector<Pending> pending;
  std::vector<Answer> skips;  // by optimizer: a loss that reaches it overflowed in another's step
  bool summed = false;  // with average = false: some gradient was reduced, which none may add to
  bool may_refuse = false;  // a backward that added broke off: all may refuse until it is cleared

  /// Backwards of one loss that was given to the same optimizers are judged as one.
  void add_pending(const Pending& more) {
    if (more.optimizers == 0) return;
    const auto same = std::find_if(pending.begin(), pending.end(), [&](const Pending& one) {
      return one.loss == more.loss && one.given == more.given;
    });
    if (same == pending.end()) return pending.push_back(more);
    same->optimizers |= more.optimizers;
    same->overflow = same->overflow || more.overflow;
    same->delayed = more.delayed;
    same->doubtful = same->doubtful || more.doubtful;
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
  /// Of the gradients that an optimizer's step would use.
  double norm(unsigned optimizer) {
    double sum = 0.0;
    each_of(optimizer, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      for (const double g : p.gradient.mean()) sum += g * g;
    });
    return std::sqrt(sum);
  }
  /// What was found in gradients that are gone goes with them, unless others of the same loss are left.
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
  void forget_pending() {
    for (Parameter& p : parameters) p.gradient = {};
    pending.clear();
    std::fill(skips.begin(), skips.end(), Answer::no);
    for (Scale& scale : scales) scale.carried = false;
    may_refuse = false;
  }
  void load(const State& file) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool trainable = parameters[i].trainable;
      parameters[i] = file.parameters[i];
      parameters[i].trainable = trainable;
    }
    positions = file.positions;
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
  void update(int optimizer, double max_norm) {
    const unsigned bit = 1U << optimizer;
    const double n = norm(bit);
    const double coefficient = max_norm > 0 && n > max_norm ? max_norm / (n + 1e-6) : 1.0;
    each_of(bit, [&](Parameter& p) {
      if (!p.trainable || !p.gradient.exists()) return;
      p.update(rules[static_cast<std::size_t>(optimizer)], lr(optimizer, p.driven), coefficient);
    });
  }
};

}  // namespace cairn::stateful
