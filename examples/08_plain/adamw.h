// AdamW on plain arrays, with the gradients clipped to a norm of 1.
#pragma once

#include <cmath>
#include <vector>

namespace plain {

class AdamW {
 public:
  AdamW(std::size_t size, float lr, float decay) : lr_(lr), decay_(decay), m_(size), v_(size) {}

  void step(std::vector<float>& weights, const std::vector<float>& gradients) {
    double squares = 0.0;
    for (const float g : gradients) squares += static_cast<double>(g) * g;
    const double norm = std::sqrt(squares);
    const auto clip = static_cast<float>(norm > 1.0 ? 1.0 / (norm + 1e-6) : 1.0);
    ++steps_;
    const float correction1 = 1.0f - std::pow(0.9f, static_cast<float>(steps_));
    const float correction2 = 1.0f - std::pow(0.999f, static_cast<float>(steps_));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const float g = gradients[i] * clip;
      m_[i] = 0.9f * m_[i] + 0.1f * g;
      v_[i] = 0.999f * v_[i] + 0.001f * g * g;
      const float update = m_[i] / correction1 / (std::sqrt(v_[i] / correction2) + 1e-8f);
      weights[i] -= lr_ * (update + decay_ * weights[i]);
    }
  }

 private:
  float lr_, decay_;
  int steps_ = 0;
  std::vector<float> m_, v_;
};

}  // namespace plain
