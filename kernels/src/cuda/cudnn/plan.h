// What computes an operation graph: the execution plans that cuDNN makes of what its heuristics
// propose for it, the best first. Which is the first is kept with the other choices (choices.h), by
// GPU and cuDNN's version.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "choices.h"
#include "cuda/cudnn/graph.h"

namespace cairn::kernels::cuda {

/// A graph, and which of its plans may be taken: deterministic ones that sum in f32.
struct PlannedGraph {
  const char* kind = "";  // of the choices: "cudnn_convolutions"
  std::string name;       // of the choice: all that the graph depends on but the device
  std::function<OperationGraph(const Queue&, const CudnnHandle&)> describe;
  bool tensor_cores = true;  // which round f32 to TF32
  std::size_t most_workspace = std::size_t{1} << 30;
};

/// A tensor of the graph, by its id: device memory or, of one that is passed by value, the host's.
struct Argument {
  std::int64_t id;
  void* data;
};

class Plan {
 public:
  /// `name`: the engine and its knobs, as in "12 2=1 13=0". `plan` is finalised.
  Plan(std::string name, Descriptor plan);
  const std::string& name() const { return name_; }
  std::size_t workspace() const { return workspace_; }

  /// Queues it; false where cuDNN refuses to run it. Any thread may call it.
  bool run(const Queue& queue, const std::vector<Argument>& arguments) const;

 private:
  std::string name_;
  Descriptor plan_;
  std::size_t workspace_;
  mutable std::mutex mutex_;  // cuDNN's plans serve one thread at a time
};

using PlanPtr = std::shared_ptr<const Plan>;

/// Of the queue's GPU and this version; `kind`: a PlannedGraph's.
Choices& plan_choices(const Queue& queue, const char* kind);

/// The plans of one graph, each made when it is asked for first. Any thread may ask.
class Plans {
 public:
  explicit Plans(PlannedGraph graph) : graph_(std::move(graph)) {}
  /// The nth; null past the last.
  PlanPtr at(const Queue& queue, std::size_t n);

 private:
  void make_first(const Queue& queue);
  PlanPtr chosen(const Queue& queue, const std::string& name);
  PlanPtr next(const Queue& queue);

  const PlannedGraph graph_;
  std::mutex mutex_;
  std::vector<PlanPtr> plans_;
  std::set<std::string> tried_;  // names of configurations
  bool begun_ = false, exhausted_ = false;
};

}  // namespace cairn::kernels::cuda
