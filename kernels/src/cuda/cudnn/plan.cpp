#include "cuda/cudnn/plan.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "cairn/core/log.h"
#include "cuda/bounded_cache.h"
#include "cuda/error.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {
namespace {

/// Of one heuristic mode, the best first.
std::vector<Descriptor> configs_of(const Queue& queue, const Descriptor& graph,
                                   cudnnBackendHeurMode_t mode) {
  static auto& one_at_a_time = *new std::mutex;  // mode B's need, by NVIDIA's cudnn-frontend
  Descriptor heuristics(queue.op(), CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, mode);
  {
    const std::lock_guard lock(one_at_a_time);
    if (!heuristics.finalize_if_supported()) return {};
  }
  return heuristics.get_all(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
}

Descriptor engine_of(const Descriptor& config) {
  return std::move(
      config.get_all(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1).front());
}

std::string name_of(const Descriptor& config) {
  std::ostringstream name;
  name << engine_of(config).get<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
  for (const Descriptor& knob :
       config.get_all(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR,
                      CUDNN_KNOB_TYPE_COUNTS)) {
    name << ' ' << knob.get<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE) << '='
         << knob.get<std::int64_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE);
  }
  return name.str();
}

/// The configuration of a name; none where this version of cuDNN has no such.
std::optional<Descriptor> config_named(const Queue& queue, const Descriptor& graph,
                                       const std::string& name) {
  std::istringstream text(name);
  std::int64_t index = -1;
  if (!(text >> index) || index < 0 ||
      index >= graph.get<std::int64_t>(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT))
    return {};
  Descriptor engine(queue.op(), CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  engine.set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
  engine.set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, index);
  if (engine.try_finalize() != CUDNN_STATUS_SUCCESS) return {};
  std::vector<Descriptor> knobs;
  for (std::string choice; text >> choice;) {
    std::istringstream parts(choice);
    int type = 0;
    char equals = ' ';
    std::int64_t value = 0;
    const bool whole = parts >> type >> equals >> value && equals == '=' && parts.eof();
    if (!whole || type < 0 || type >= CUDNN_KNOB_TYPE_COUNTS) return {};
    Descriptor& knob = knobs.emplace_back(queue.op(), CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    knob.set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, static_cast<cudnnBackendKnobType_t>(type));
    knob.set(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, value);
    if (knob.try_finalize() != CUDNN_STATUS_SUCCESS) return {};
  }
  Descriptor config(queue.op(), CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  config.set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
  if (!knobs.empty()) config.set(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, knobs);
  if (config.try_finalize() != CUDNN_STATUS_SUCCESS) return {};
  return config;
}

/// Deterministic; sums in f32; inputs as they are, or in TF32 where that is allowed.
bool suits(const PlannedGraph& graph, const Descriptor& config) {
  const auto notes = engine_of(config).get_all<cudnnBackendNumericalNote_t>(
      CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
  const auto has = [&](cudnnBackendNumericalNote_t note) {
    return std::find(notes.begin(), notes.end(), note) != notes.end();
  };
  if (has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) ||
      has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) ||
      has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS))
    return false;
  return graph.tensor_cores || !has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
}

/// Null where it does not suit, or cuDNN makes no plan of it.
PlanPtr plan_of(const Queue& queue, const CudnnHandle& handle, const PlannedGraph& graph,
                const Descriptor& config, const std::string& name) {
  if (!suits(graph, config)) return nullptr;
  Descriptor made(queue.op(), CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  made.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, cudnnHandle_t{handle});
  made.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (!made.finalize_if_supported()) return nullptr;
  auto plan = std::make_shared<const Plan>(name, std::move(made));
  return plan->workspace() <= graph.most_workspace ? plan : nullptr;
}

/// cuDNN unloads a plan's code with the plan; graphs go on launching it.
void keep_for_graphs(PlanPtr plan) {
  static auto& mutex = *new std::mutex;
  static auto& kept = *new std::set<PlanPtr>;
  const std::lock_guard lock(mutex);
  kept.insert(std::move(plan));
}

}  // namespace

Choices& plan_choices(const Queue& queue, const char* kind) {
  using Key = std::pair<int, std::string>;
  static auto& machines = *new BoundedCache<Key, Choices*>(1024);
  return *machines.get({queue.device().index, kind}, [&] {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, queue.device().index), queue.op(),
               "cudaGetDeviceProperties");
    return &shared_choices(kind, core::str(properties.name, ", cuDNN ", cudnnGetVersion()));
  });
}

Plan::Plan(std::string name, Descriptor plan)
    : name_(std::move(name)),
      plan_(std::move(plan)),
      workspace_(static_cast<std::size_t>(
          plan_.get<std::int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE))) {}

bool Plan::run(const Queue& queue, const std::vector<Argument>& arguments) const {
  const auto workspace = queue.workspace(workspace_);
  std::vector<std::int64_t> ids;
  std::vector<void*> pointers;
  for (const Argument& argument : arguments) {
    ids.push_back(argument.id);
    pointers.push_back(argument.data);
  }
  Descriptor pack(queue.op(), CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, pointers);
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, workspace->data());
  pack.finalize();
  const CudnnHandle handle(queue);
  const std::lock_guard lock(mutex_);
  const cudnnStatus_t status = cudnnBackendExecute(handle, plan_.raw(), pack.raw());
  if (is_unsupported(status)) return false;
  check_cudnn(status, queue.op(), "cudnnBackendExecute");
  return true;
}

PlanPtr Plans::at(const Queue& queue, std::size_t n) {
  const std::lock_guard lock(mutex_);
  if (!begun_) make_first(queue);
  begun_ = true;
  while (plans_.size() <= n && !exhausted_) {
    PlanPtr plan = next(queue);
    exhausted_ = plan == nullptr;
    if (!exhausted_) plans_.push_back(std::move(plan));
  }
  if (plans_.size() <= n) return nullptr;
  if (queue.capturing()) keep_for_graphs(plans_[n]);
  return plans_[n];
}

/// The one that was chosen before goes first, the best proposed now behind it.
void Plans::make_first(const Queue& queue) {
  if (product_setting() != kTimeProducts) return;
  Choices& kept = plan_choices(queue, graph_.kind);
  const std::string& work = graph_.name;
  std::optional<std::string> name = kept.find(work);
  PlanPtr best;
  if (!name) {
    best = next(queue);
    if (best != nullptr) name = kept.keep(work, best->name());
  }
  if (name && (best == nullptr || *name != best->name())) {
    if (auto plan = chosen(queue, *name)) {
      plans_.push_back(std::move(plan));
    } else {
      log::warn(
          "cuDNN, {}: the plan chosen before, '{}', is none of this version's; takes its first "
          "proposal, which may round otherwise",
          work, *name);
    }
  }
  if (best != nullptr) plans_.push_back(std::move(best));
}

PlanPtr Plans::chosen(const Queue& queue, const std::string& name) {
  const CudnnHandle handle(queue);
  const OperationGraph graph = graph_.describe(queue, handle);
  if (!graph.is_supported()) return nullptr;
  const auto config = config_named(queue, graph.graph(), name);
  if (!config) return nullptr;
  tried_.insert(name);
  return plan_of(queue, handle, graph_, *config, name);
}

/// The best that was not tried yet. Asks anew each time, since descriptors belong to a handle, and
/// a handle to one thread at a time; more than the first is seldom wanted.
PlanPtr Plans::next(const Queue& queue) {
  const CudnnHandle handle(queue);
  const OperationGraph graph = graph_.describe(queue, handle);
  if (!graph.is_supported()) return nullptr;
  for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK}) {
    for (const Descriptor& config : configs_of(queue, graph.graph(), mode)) {
      const std::string name = name_of(config);
      if (!tried_.insert(name).second) continue;
      if (auto plan = plan_of(queue, handle, graph_, config, name)) return plan;
    }
  }
  return nullptr;
}

}  // namespace cairn::kernels::cuda
