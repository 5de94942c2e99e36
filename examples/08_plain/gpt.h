// A small GPT on arrays of its own, its forward and backward written by hand. No library is needed.
//
// Weights and gradients are two arrays of Real (float, or a 16-bit type that converts from and to
// float), all parameters one after another; everything else is float. Sizes: B sequences of T
// tokens, N = B T positions, C channels, H heads, V tokens in the vocabulary. Blocks are x +
// attention(norm(x)), then x + mlp(norm(x)).
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace plain {

struct Sizes {
  std::size_t vocabulary = 16, tokens = 32, width = 32, heads = 4, layers = 2;
};

using Floats = std::vector<float>;

// ---- Layers: *_backward adds to dx and writes the gradients of weights.

template <class Real>
Floats row_of(const Real* matrix, std::size_t row, std::size_t width) {
  Floats values(width);
  for (std::size_t i = 0; i < width; ++i) values[i] = static_cast<float>(matrix[row * width + i]);
  return values;
}

/// y [N, O] = x [N, I] w^T + b, w [O, I].
template <class Real>
void linear(Floats& y, const Floats& x, const Real* w, const Real* b, std::size_t n, std::size_t in,
            std::size_t out) {
  y.resize(n * out);
  for (std::size_t o = 0; o < out; ++o) {
    const Floats row = row_of(w, o, in);
    for (std::size_t p = 0; p < n; ++p) {
      float sum = static_cast<float>(b[o]);
      for (std::size_t i = 0; i < in; ++i) sum += row[i] * x[p * in + i];
      y[p * out + o] = sum;
    }
  }
}

template <class Real>
void linear_backward(Floats& dx, Real* dw, Real* db, const Floats& dy, const Floats& x,
                     const Real* w, std::size_t n, std::size_t in, std::size_t out) {
  for (std::size_t o = 0; o < out; ++o) {
    const Floats row = row_of(w, o, in);
    Floats drow(in, 0.0f);
    float sum = 0.0f;
    for (std::size_t p = 0; p < n; ++p) {
      const float g = dy[p * out + o];
      sum += g;
      for (std::size_t i = 0; i < in; ++i) {
        dx[p * in + i] += g * row[i];
        drow[i] += g * x[p * in + i];
      }
    }
    db[o] = Real(sum);
    for (std::size_t i = 0; i < in; ++i) dw[o * in + i] = Real(drow[i]);
  }
}

/// Over the C channels of each position.
struct Norm {
  Floats y, mean, rstd;

  template <class Real>
  void forward(const Floats& x, const Real* w, const Real* b, std::size_t n, std::size_t c) {
    y.resize(n * c);
    mean.resize(n);
    rstd.resize(n);
    for (std::size_t p = 0; p < n; ++p) {
      float sum = 0.0f, squares = 0.0f;
      for (std::size_t i = 0; i < c; ++i) sum += x[p * c + i];
      mean[p] = sum / static_cast<float>(c);
      for (std::size_t i = 0; i < c; ++i) {
        squares += (x[p * c + i] - mean[p]) * (x[p * c + i] - mean[p]);
      }
      rstd[p] = 1.0f / std::sqrt(squares / static_cast<float>(c) + 1e-5f);
      for (std::size_t i = 0; i < c; ++i) {
        const float normal = (x[p * c + i] - mean[p]) * rstd[p];
        y[p * c + i] = normal * static_cast<float>(w[i]) + static_cast<float>(b[i]);
      }
    }
  }

  template <class Real>
  void backward(Floats& dx, Real* dw, Real* db, const Floats& dy, const Floats& x, const Real* w,
                std::size_t n, std::size_t c) const {
    Floats dweight(c, 0.0f), dbias(c, 0.0f);
    for (std::size_t p = 0; p < n; ++p) {
      float sum = 0.0f, product = 0.0f;  // of the gradient of the normal values
      for (std::size_t i = 0; i < c; ++i) {
        const float normal = (x[p * c + i] - mean[p]) * rstd[p];
        const float g = dy[p * c + i] * static_cast<float>(w[i]);
        sum += g;
        product += g * normal;
        dweight[i] += dy[p * c + i] * normal;
        dbias[i] += dy[p * c + i];
      }
      for (std::size_t i = 0; i < c; ++i) {
        const float normal = (x[p * c + i] - mean[p]) * rstd[p];
        const float g = dy[p * c + i] * static_cast<float>(w[i]);
        dx[p * c + i] += (g - (sum + normal * product) / static_cast<float>(c)) * rstd[p];
      }
    }
    for (std::size_t i = 0; i < c; ++i) {
      dw[i] = Real(dweight[i]);
      db[i] = Real(dbias[i]);
    }
  }
};

/// Causal self-attention of qkv [N, 3 C] = q | k | v; keeps the probabilities [B, H, T, T].
struct Attention {
  std::size_t batch = 0, tokens = 0, heads = 0, width = 0;
  Floats y, weights;

  std::size_t size() const { return width / heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(size())); }
  /// Where q (part 0), k (1) or v (2) of a head begins.
  std::size_t place(std::size_t b, std::size_t t, std::size_t head, std::size_t part) const {
    return (b * tokens + t) * 3 * width + part * width + head * size();
  }
  std::size_t row(std::size_t b, std::size_t head, std::size_t t) const {
    return ((b * heads + head) * tokens + t) * tokens;
  }
  std::size_t out(std::size_t b, std::size_t t, std::size_t head) const {
    return (b * tokens + t) * width + head * size();
  }

  void forward(const Floats& qkv) {
    y.assign(batch * tokens * width, 0.0f);
    weights.assign(batch * heads * tokens * tokens, 0.0f);
    for (std::size_t b = 0; b < batch; ++b) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t t = 0; t < tokens; ++t) forward_row(qkv, b, h, t);
      }
    }
  }

  void forward_row(const Floats& qkv, std::size_t b, std::size_t h, std::size_t t) {
    float* w = &weights[row(b, h, t)];
    float most = -INFINITY, sum = 0.0f;
    for (std::size_t s = 0; s <= t; ++s) {
      float product = 0.0f;
      for (std::size_t i = 0; i < size(); ++i) {
        product += qkv[place(b, t, h, 0) + i] * qkv[place(b, s, h, 1) + i];
      }
      w[s] = product * scale();
      most = std::fmax(most, w[s]);
    }
    for (std::size_t s = 0; s <= t; ++s) sum += w[s] = std::exp(w[s] - most);
    for (std::size_t s = 0; s <= t; ++s) {
      w[s] /= sum;
      for (std::size_t i = 0; i < size(); ++i) {
        y[out(b, t, h) + i] += w[s] * qkv[place(b, s, h, 2) + i];
      }
    }
  }

  void backward(Floats& dqkv, const Floats& dy, const Floats& qkv) const {
    for (std::size_t b = 0; b < batch; ++b) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t t = 0; t < tokens; ++t) backward_row(dqkv, dy, qkv, b, h, t);
      }
    }
  }

  void backward_row(Floats& dqkv, const Floats& dy, const Floats& qkv, std::size_t b, std::size_t h,
                    std::size_t t) const {
    const float* w = &weights[row(b, h, t)];
    const float* g = &dy[out(b, t, h)];
    Floats dweight(t + 1, 0.0f);
    float mean = 0.0f;
    for (std::size_t s = 0; s <= t; ++s) {
      for (std::size_t i = 0; i < size(); ++i) {
        dweight[s] += g[i] * qkv[place(b, s, h, 2) + i];
        dqkv[place(b, s, h, 2) + i] += g[i] * w[s];
      }
      mean += dweight[s] * w[s];
    }
    for (std::size_t s = 0; s <= t; ++s) {
      const float dproduct = w[s] * (dweight[s] - mean) * scale();
      for (std::size_t i = 0; i < size(); ++i) {
        dqkv[place(b, t, h, 0) + i] += dproduct * qkv[place(b, s, h, 1) + i];
        dqkv[place(b, s, h, 1) + i] += dproduct * qkv[place(b, t, h, 0) + i];
      }
    }
  }
};

// GELU in the form with tanh.
inline constexpr float kGelu = 0.7978845608f, kCubic = 0.044715f;

inline float gelu(float x) {
  return 0.5f * x * (1.0f + std::tanh(kGelu * (x + kCubic * x * x * x)));
}
inline float gelu_slope(float x) {
  const float t = std::tanh(kGelu * (x + kCubic * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kGelu * (1.0f + 3.0f * kCubic * x * x);
}

// ---- The model

/// A parameter: its values are weights[begin ...] and gradients[begin ...], row-major.
struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t begin = 0, size = 0;
};

template <class Real>
class Gpt {
 public:
  Gpt(const Sizes& sizes, unsigned seed) : sizes_(sizes) {
    const std::size_t c = sizes.width;
    std::mt19937 random(seed);
    add_normal("wte", {sizes.vocabulary, c}, 0.02f, random);
    add_normal("wpe", {sizes.tokens, c}, 0.02f, random);
    const float deep = 0.02f / std::sqrt(2.0f * static_cast<float>(sizes.layers));
    for (std::size_t l = 0; l < sizes.layers; ++l) {
      const std::string block = "block" + std::to_string(l) + ".";
      add_norm(block + "norm1");
      add_linear(block + "qkv", c, 3 * c, 0.02f, random);
      add_linear(block + "out", c, c, deep, random);
      add_norm(block + "norm2");
      add_linear(block + "up", c, 4 * c, 0.02f, random);
      add_linear(block + "down", 4 * c, c, deep, random);
    }
    add_norm("norm");
    add_linear("head", c, sizes.vocabulary, 0.02f, random);
    gradients.assign(weights.size(), Real(0.0f));
  }

  std::vector<Parameter> parameters;
  std::vector<Real> weights, gradients;

  /// The mean loss of the next token: inputs and targets are [B, T].
  float forward(const std::vector<int>& inputs, const std::vector<int>& targets) {
    inputs_ = inputs;
    targets_ = targets;
    const std::size_t n = inputs.size(), c = sizes_.width;
    blocks_.resize(sizes_.layers);
    x_.resize(n * c);
    for (std::size_t p = 0; p < n; ++p) {
      const Floats token = row_of(w(kToken), static_cast<std::size_t>(inputs[p]), c);
      const Floats position = row_of(w(kPosition), p % sizes_.tokens, c);
      for (std::size_t i = 0; i < c; ++i) x_[p * c + i] = token[i] + position[i];
    }
    for (std::size_t l = 0; l < sizes_.layers; ++l)
      forward_block(l, l == 0 ? x_ : blocks_[l - 1].y);
    const Floats& last = sizes_.layers == 0 ? x_ : blocks_.back().y;
    norm_.forward(last, w(kHead), w(kHead + 1), n, c);
    linear(logits_, norm_.y, w(kHead + 2), w(kHead + 3), n, c, sizes_.vocabulary);
    return softmax_loss();
  }

  /// Writes the gradients of `scale` times the loss of the last forward; calls ready(i) as soon as
  /// those of parameter i are there.
  void backward(
      float scale = 1.0f, const std::function<void(std::size_t)>& ready = [](std::size_t) {}) {
    const std::size_t n = inputs_.size(), c = sizes_.width, v = sizes_.vocabulary;
    Floats dlogits = logits_;  // probabilities since the forward
    for (std::size_t p = 0; p < n; ++p) {
      dlogits[p * v + static_cast<std::size_t>(targets_[p])] -= 1.0f;
    }
    for (float& g : dlogits) g *= scale / static_cast<float>(n);
    Floats dnorm(n * c, 0.0f), dx(n * c, 0.0f);
    linear_backward(dnorm, dw(kHead + 2), dw(kHead + 3), dlogits, norm_.y, w(kHead + 2), n, c, v);
    const Floats& last = sizes_.layers == 0 ? x_ : blocks_.back().y;
    norm_.backward(dx, dw(kHead), dw(kHead + 1), dnorm, last, w(kHead), n, c);
    tell(ready, head(), head() + 4);
    for (std::size_t l = sizes_.layers; l-- > 0;) {
      backward_block(l, dx, l == 0 ? x_ : blocks_[l - 1].y);
      tell(ready, block(l), block(l) + kPerBlock);
    }
    embedding_backward(dx);
    tell(ready, 0, 2);
  }

 private:
  // Places in `parameters`; kHead and above count from the end of the blocks.
  static constexpr std::size_t kToken = 0, kPosition = 1, kPerBlock = 12, kHead = 1000;
  std::size_t block(std::size_t l) const { return 2 + l * kPerBlock; }
  std::size_t head() const { return block(sizes_.layers); }
  std::size_t begin(std::size_t i) const {
    return parameters[i >= kHead ? head() + i - kHead : i].begin;
  }
  const Real* w(std::size_t i) const { return &weights[begin(i)]; }
  Real* dw(std::size_t i) { return &gradients[begin(i)]; }

  struct Block {
    Norm norm1, norm2;
    Attention attention;
    Floats qkv, out, middle, up, active, down, y;
  };

  Real* add(const std::string& name, const std::vector<std::size_t>& shape) {
    Parameter parameter{name, {shape.begin(), shape.end()}, weights.size(), 1};
    for (const std::size_t size : shape) parameter.size *= size;
    weights.resize(weights.size() + parameter.size, Real(0.0f));
    parameters.push_back(parameter);
    return &weights[parameter.begin];
  }
  void add_normal(const std::string& name, const std::vector<std::size_t>& shape, float deviation,
                  std::mt19937& random) {
    Real* values = add(name, shape);
    std::normal_distribution<float> normal(0.0f, deviation);
    for (std::size_t i = 0; i < parameters.back().size; ++i) values[i] = Real(normal(random));
  }
  void add_linear(const std::string& name, std::size_t in, std::size_t out, float deviation,
                  std::mt19937& random) {
    add_normal(name + ".weight", {out, in}, deviation, random);
    add(name + ".bias", {out});
  }
  void add_norm(const std::string& name) {
    Real* ones = add(name + ".weight", {sizes_.width});
    for (std::size_t i = 0; i < sizes_.width; ++i) ones[i] = Real(1.0f);
    add(name + ".bias", {sizes_.width});
  }

  void forward_block(std::size_t l, const Floats& x) {
    Block& b = blocks_[l];
    const std::size_t n = inputs_.size(), c = sizes_.width, p = block(l);
    b.norm1.forward(x, w(p), w(p + 1), n, c);
    linear(b.qkv, b.norm1.y, w(p + 2), w(p + 3), n, c, 3 * c);
    b.attention.batch = n / sizes_.tokens;
    b.attention.tokens = sizes_.tokens;
    b.attention.heads = sizes_.heads;
    b.attention.width = c;
    b.attention.forward(b.qkv);
    linear(b.out, b.attention.y, w(p + 4), w(p + 5), n, c, c);
    b.middle.resize(n * c);
    for (std::size_t i = 0; i < n * c; ++i) b.middle[i] = x[i] + b.out[i];
    b.norm2.forward(b.middle, w(p + 6), w(p + 7), n, c);
    linear(b.up, b.norm2.y, w(p + 8), w(p + 9), n, c, 4 * c);
    b.active.resize(n * 4 * c);
    for (std::size_t i = 0; i < n * 4 * c; ++i) b.active[i] = gelu(b.up[i]);
    linear(b.down, b.active, w(p + 10), w(p + 11), n, 4 * c, c);
    b.y.resize(n * c);
    for (std::size_t i = 0; i < n * c; ++i) b.y[i] = b.middle[i] + b.down[i];
  }

  /// dx: the gradient of the block's result, which becomes that of its input.
  void backward_block(std::size_t l, Floats& dx, const Floats& x) {
    const Block& b = blocks_[l];
    const std::size_t n = inputs_.size(), c = sizes_.width, p = block(l);
    Floats dup(n * 4 * c, 0.0f), dnorm(n * c, 0.0f);
    linear_backward(dup, dw(p + 10), dw(p + 11), dx, b.active, w(p + 10), n, 4 * c, c);
    for (std::size_t i = 0; i < n * 4 * c; ++i) dup[i] *= gelu_slope(b.up[i]);
    linear_backward(dnorm, dw(p + 8), dw(p + 9), dup, b.norm2.y, w(p + 8), n, c, 4 * c);
    b.norm2.backward(dx, dw(p + 6), dw(p + 7), dnorm, b.middle, w(p + 6), n, c);
    Floats dattention(n * c, 0.0f), dqkv(n * 3 * c, 0.0f);
    linear_backward(dattention, dw(p + 4), dw(p + 5), dx, b.attention.y, w(p + 4), n, c, c);
    b.attention.backward(dqkv, dattention, b.qkv);
    dnorm.assign(n * c, 0.0f);
    linear_backward(dnorm, dw(p + 2), dw(p + 3), dqkv, b.norm1.y, w(p + 2), n, c, 3 * c);
    b.norm1.backward(dx, dw(p), dw(p + 1), dnorm, x, w(p), n, c);
  }

  void embedding_backward(const Floats& dx) {
    const std::size_t c = sizes_.width;
    Floats dtoken(sizes_.vocabulary * c, 0.0f), dposition(sizes_.tokens * c, 0.0f);
    for (std::size_t p = 0; p < inputs_.size(); ++p) {
      for (std::size_t i = 0; i < c; ++i) {
        dtoken[static_cast<std::size_t>(inputs_[p]) * c + i] += dx[p * c + i];
        dposition[p % sizes_.tokens * c + i] += dx[p * c + i];
      }
    }
    for (std::size_t i = 0; i < dtoken.size(); ++i) dw(kToken)[i] = Real(dtoken[i]);
    for (std::size_t i = 0; i < dposition.size(); ++i) dw(kPosition)[i] = Real(dposition[i]);
  }

  /// Turns logits into probabilities.
  float softmax_loss() {
    const std::size_t n = inputs_.size(), v = sizes_.vocabulary;
    double loss = 0.0;
    for (std::size_t p = 0; p < n; ++p) {
      float* row = &logits_[p * v];
      float most = -INFINITY, sum = 0.0f;
      for (std::size_t i = 0; i < v; ++i) most = std::fmax(most, row[i]);
      const float target = row[static_cast<std::size_t>(targets_[p])] - most;
      for (std::size_t i = 0; i < v; ++i) sum += row[i] = std::exp(row[i] - most);
      for (std::size_t i = 0; i < v; ++i) row[i] /= sum;
      loss += std::log(sum) - target;
    }
    return static_cast<float>(loss / static_cast<double>(n));
  }

  static void tell(const std::function<void(std::size_t)>& ready, std::size_t first,
                   std::size_t end) {
    for (std::size_t i = end; i-- > first;) ready(i);
  }

  Sizes sizes_;
  std::vector<int> inputs_, targets_;
  std::vector<Block> blocks_;
  Floats x_, logits_;
  Norm norm_;
};

}  // namespace plain
