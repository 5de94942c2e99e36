#include "shared_writes.h"

#include <algorithm>

#include "cairn/core/error.h"
#include "cairn/kernels/hash_tensors.h"

namespace cairn::libtorch {

namespace {

constexpr std::int64_t kHashed = 64;  // elements: whoever clips or steps writes all

/// The first elements in memory.
TensorView head_of(const Tensor& x) {
  return {x.raw_data(), Shape{std::min(x.numel(), kHashed)}, Strides{1}, x.dtype(), x.device()};
}

bool is_zero(const Tensor& x, std::uint64_t hash) {
  const Tensor zeros = Tensor::zeros({std::min(x.numel(), kHashed)}, x.dtype());
  return kernels::hash_tensors({zeros}).front() == hash;
}

}  // namespace

std::vector<SharedWrites::Looks> SharedWrites::looks_of(const std::vector<Parameter>& waiting) {
  std::vector<TensorView> views;
  for (const Parameter& parameter : waiting) {
    views.push_back(head_of(parameter.weight));
    views.push_back(head_of(parameter.gradient));
  }
  const std::vector<std::uint64_t> values = kernels::hash_tensors(views);
  std::vector<Looks> looks;
  for (std::size_t i = 0; i < waiting.size(); ++i)
    looks.push_back({values[2 * i], values[2 * i + 1], waiting[i].version});
  return looks;
}

void SharedWrites::remember(const std::vector<Parameter>& waiting) {
  known_.clear();
  const std::vector<Looks> looks = looks_of(waiting);
  for (std::size_t i = 0; i < waiting.size(); ++i) known_[waiting[i].name] = looks[i];
}

void SharedWrites::check(const std::vector<Parameter>& waiting) const {
  if (known_.empty()) return;
  const std::vector<Looks> now = looks_of(waiting);
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    const Parameter& parameter = waiting[i];
    const auto known = known_.find(parameter.name);
    if (known == known_.end()) continue;
    CAIRN_CHECK(known->second.weight == now[i].weight, "libtorch", "expected '", parameter.name,
                "' as it was in the backward whose gradients wait for a step, got other values ",
                "(a torch::optim step left in the loop? precision.step() is the only one; ",
                "zero_grad() drops the gradients)");
    const bool same =
        known->second.gradient == now[i].gradient && known->second.version == now[i].version;
    CAIRN_CHECK(same || !parameter.in_parts, "libtorch", "expected the gradient of '",
                parameter.name, "' as its backwards left it, of which .grad has the last loss's ",
                "part alone, got one that was written ",
                "(precision.unscale(optimizer) before clip_grad_norm_ and other edits makes .grad ",
                "the whole; zero_grad() drops it)");
    CAIRN_CHECK(same || !parameter.divided, "libtorch", "expected the gradient of '",
                parameter.name, "' as its backward left it, of which this rank has a part, got ",
                ".grad written, which has no elements ",
                "(step({.max_gradient_norm = ...}) clips; zero_grad() drops it)");
    const bool may_differ = parameter.factor == 1.0 || is_zero(parameter.gradient, now[i].gradient);
    CAIRN_CHECK(same || may_differ, "libtorch", "expected the gradient of '", parameter.name,
                "' as its backward left it, ", "multiplied by the loss scale ", parameter.factor,
                ", got one that was written ",
                "(step({.max_gradient_norm = ...}) clips; or precision.unscale(optimizer) before ",
                "clip_grad_norm_ and other edits)");
  }
}

}  // namespace cairn::libtorch
