// What computes a convolution: the execution plans that cuDNN makes of what its heuristics propose
// for a shape, the best first. Which is the first is kept with the other choices (choices.h), by
// GPU and cuDNN's version.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/cudnn/conv_graph.h"

namespace cairn::kernels::cuda {

/// Deterministic, and in the precision that its shape asks for.
class ConvPlan {
 public:
  /// `name`: the engine and its knobs, as in "12 2=1 13=0". `plan` is finalised.
  ConvPlan(std::string name, Descriptor plan);
  const std::string& name() const { return name_; }
  std::size_t workspace() const { return workspace_; }

  /// Queues it; false where cuDNN refuses to run it. Any thread may call it.
  bool run(const Queue& queue, void* x, void* weight, void* y) const;

 private:
  std::string name_;
  Descriptor plan_;
  std::size_t workspace_;
  mutable std::mutex mutex_;  // cuDNN's plans serve one thread at a time
};

using ConvPlanPtr = std::shared_ptr<const ConvPlan>;

/// The plans of one shape, each made when it is asked for first. Any thread may ask.
class ConvPlans {
 public:
  explicit ConvPlans(const ConvShape& shape) : shape_(shape) {}
  /// The nth; null past the last.
  ConvPlanPtr at(const Queue& queue, std::size_t n);

 private:
  void make_first(const Queue& queue);
  ConvPlanPtr chosen(const Queue& queue, const std::string& name);
  ConvPlanPtr next(const Queue& queue);

  const ConvShape shape_;
  std::mutex mutex_;
  std::vector<ConvPlanPtr> plans_;
  std::set<std::string> tried_;  // names of configurations
  bool begun_ = false, exhausted_ = false;
};

/// Without any, where cuDNN has nothing that is deterministic for the shape.
std::shared_ptr<ConvPlans> conv_plans_for(const ConvShape& shape);

/// How many images cuDNN takes at once, given its limit on a tensor's elements. Throws Unsupported
/// where one image or the weight is past it.
std::int64_t images_at_once(const char* op, const Shape& x, const Shape& weight, const Shape& y);

}  // namespace cairn::kernels::cuda
