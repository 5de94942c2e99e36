// Table lookup.
#pragma once

#include "cairn/nn/module.h"

namespace cairn::nn {

/// Maps index [...] i64 in 0..V-1 to rows of weight [V, D]: [..., D]. The weight starts normal(0,
/// 1).
class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t size);
  std::string kind() const override { return "Embedding"; }
  Tensor forward(const Tensor& index) override;
  const Tensor& weight() const { return weight_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Tensor weight_;
};

}  // namespace cairn::nn
