// Layers without parameters: activations, Dropout, Flatten, Identity.
#pragma once

#include "cairn/autograd/ops.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

class ReLU : public Module {
 public:
  std::string kind() const override { return "ReLU"; }
  Tensor forward(const Tensor& x) override { return autograd::relu(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<ReLU>(); }
};

class LeakyReLU : public Module {
 public:
  explicit LeakyReLU(double slope = 0.01) : slope_(slope) { extra_ = core::str("slope ", slope); }
  std::string kind() const override { return "LeakyReLU"; }
  Tensor forward(const Tensor& x) override { return autograd::leaky_relu(x, slope_); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<LeakyReLU>(slope_); }

 private:
  double slope_;
};

struct GELUOptions {
  bool tanh_approximation = false;  // GPT-2's; the exact one uses erf
};
class GELU : public Module {
 public:
  explicit GELU(const GELUOptions& options = {}) : options_(options) {
    if (options.tanh_approximation) extra_ = "tanh";
  }
  std::string kind() const override { return "GELU"; }
  Tensor forward(const Tensor& x) override {
    return autograd::gelu(x, options_.tanh_approximation);
  }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<GELU>(options_); }

 private:
  GELUOptions options_;
};

class SiLU : public Module {
 public:
  std::string kind() const override { return "SiLU"; }
  Tensor forward(const Tensor& x) override { return autograd::silu(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<SiLU>(); }
};

/// x where it is above 0, else alpha (exp(x) - 1).
class ELU : public Module {
 public:
  explicit ELU(double alpha = 1.0) : alpha_(alpha) { extra_ = core::str("alpha ", alpha); }
  std::string kind() const override { return "ELU"; }
  Tensor forward(const Tensor& x) override { return autograd::elu(x, alpha_); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<ELU>(alpha_); }

 private:
  double alpha_;
};

/// x where it is above 0, else times a learnt weight: one for all, or one for each channel of
/// [N, C] or [N, C, H, W].
class PReLU : public Module {
 public:
  explicit PReLU(std::int64_t channels = 1, double initial = 0.25)
      : weight_(add_parameter("weight", Tensor::full({channels}, initial))) {}
  std::string kind() const override { return "PReLU"; }
  Tensor forward(const Tensor& x) override {
    const bool by_channel = weight_.size(0) > 1 && x.dims() == 4;
    return autograd::prelu(
        x, by_channel ? autograd::reshape(weight_, {weight_.size(0), 1, 1}) : weight_);
  }

 protected:
  std::shared_ptr<Module> make_like() const override {
    return std::make_shared<PReLU>(weight_.size(0));
  }

 private:
  Tensor weight_;
};

class Softplus : public Module {
 public:
  std::string kind() const override { return "Softplus"; }
  Tensor forward(const Tensor& x) override { return autograd::softplus(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Softplus>(); }
};

class Mish : public Module {
 public:
  std::string kind() const override { return "Mish"; }
  Tensor forward(const Tensor& x) override { return autograd::mish(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Mish>(); }
};

class Sigmoid : public Module {
 public:
  std::string kind() const override { return "Sigmoid"; }
  Tensor forward(const Tensor& x) override { return autograd::sigmoid(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Sigmoid>(); }
};

class Tanh : public Module {
 public:
  std::string kind() const override { return "Tanh"; }
  Tensor forward(const Tensor& x) override { return autograd::tanh(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Tanh>(); }
};

/// In training zeroes each element with probability p and multiplies the others by 1 / (1 - p); in
/// evaluation does nothing.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);
  std::string kind() const override { return "Dropout"; }
  Tensor forward(const Tensor& x) override { return training() ? autograd::dropout(x, p_) : x; }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Dropout>(p_); }

 private:
  double p_;
};

/// [N, ...] -> [N, the rest], in row-major order of the shape whatever the storage.
class Flatten : public Module {
 public:
  std::string kind() const override { return "Flatten"; }
  Tensor forward(const Tensor& x) override { return autograd::flatten(x); }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Flatten>(); }
};

/// Its input: in the place of a layer that is left out.
class Identity : public Module {
 public:
  std::string kind() const override { return "Identity"; }
  Tensor forward(const Tensor& x) override { return x; }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Identity>(); }
};

}  // namespace cairn::nn
