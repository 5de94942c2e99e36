// A backward of libtorch as an operation of Cairn's graph, so that it is a run like any other: its
// gradients land in slots, in one piece or not at all, and hooks see each the moment that it is
// complete.
#pragma once

#include <torch/types.h>

#include <vector>

#include "cairn/libtorch/model.h"

namespace cairn::libtorch {

/// The loss as Cairn's tensor, f32, one element, which depends on the parameters that it reaches.
/// Throws InvalidArgument where it reaches none of these models'.
Tensor loss_of(const torch::Tensor& loss, const std::vector<Model*>& models, bool retain_graph);

/// A backward of these models: it follows first what libtorch's side has changed. At its end each
/// .grad shows what the slot holds, of parameters too that only other ranks' losses reach:
/// zero_grad() clears the same on all ranks.
class FollowedBackward {
 public:
  explicit FollowedBackward(const std::vector<Model*>& models);
  ~FollowedBackward();
  FollowedBackward(const FollowedBackward&) = delete;
  FollowedBackward& operator=(const FollowedBackward&) = delete;

 private:
  const std::vector<Model*>& models_;
};

/// From libtorch's hook: moves a complete gradient, or adds it, into the parameter's slot, unless
/// it lies there; returns the slot's memory. Throws InvalidArgument outside of a backward of
/// Cairn's.
Tensor land_gradient(const Tensor& parameter, const torch::Tensor& gradient);

}  // namespace cairn::libtorch
