#include "cairn/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::optim {

/// Entries that one kernel call updates: one device, one step count.
struct Optimizer::Batch {
  Device device;
  std::int64_t step = 0;
  std::vector<kernels::UpdateEntry> entries;
};

namespace {

bool has_gradient(const Tensor& parameter) {
  return parameter.requires_grad() && parameter.grad().defined();
}

bool same_layout(const TensorView& a, const TensorView& b) {
  for (int i = 0; i < a.dims(); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

/// f32, laid out like x, on x's device, accounted as optimizer state.
Tensor state_like(const Tensor& x) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  return Tensor::empty_strided(x.shape(), x.strides(), DType::f32, x.device());
}

Tensor copy_like(const Tensor& values, const Tensor& x) {
  Tensor copy = state_like(x);
  kernels::copy(values, copy);
  return copy;
}

void check_parameter(const NamedTensor& parameter) {
  const auto& [name, tensor] = parameter;
  CAIRN_CHECK(!name.empty(), "optimizer", "expected parameters with names, got an empty name");
  CAIRN_CHECK(tensor.defined(), "optimizer", "expected a tensor '", name,
              "', got an undefined one");
  CAIRN_CHECK(core::is_half(tensor.dtype()) || tensor.dtype() == DType::f32, "optimizer",
              "expected parameters of f16, bf16 or f32, got '", name, "' of ", tensor.dtype());
  CAIRN_CHECK(tensor.view().is_dense(), "optimizer", "expected dense parameters, got '", name,
              "' with shape ", tensor.shape(), " and strides ", tensor.strides());
}

void check_group(const ParameterGroup& group, const std::vector<ParameterGroup>& others) {
  CAIRN_CHECK(std::isfinite(group.lr) && group.lr >= 0, "optimizer",
              "expected a learning rate >= 0, got ", group.lr);
  CAIRN_CHECK(std::isfinite(group.weight_decay) && group.weight_decay >= 0, "optimizer",
              "expected a weight decay >= 0, got ", group.weight_decay);
  std::unordered_set<const void*> tensors;
  std::unordered_set<std::string> names;
  for (const ParameterGroup& other : others) {
    for (const NamedTensor& parameter : other.parameters) {
      tensors.insert(parameter.tensor.id());
      names.insert(parameter.name);
    }
  }
  for (const NamedTensor& parameter : group.parameters) {
    check_parameter(parameter);
    const bool fresh = tensors.insert(parameter.tensor.id()).second;
    CAIRN_CHECK(names.insert(parameter.name).second && fresh, "optimizer",
                "expected each parameter once, got '", parameter.name, "' again");
  }
}

}  // namespace

std::string GradientReport::describe() const {
  if (finite()) return {};
  return core::str(is_nan ? "NaN" : "inf", " in the gradient of ", culprit, " (", nonfinite_count,
                   nonfinite_count == 1 ? " element)" : " elements)");
}

Optimizer::Optimizer(std::vector<ParameterGroup> groups) {
  CAIRN_CHECK(!groups.empty(), "optimizer", "expected at least one parameter group, got none");
  for (ParameterGroup& group : groups) {
    check_group(group, groups_);
    state_.emplace_back(group.parameters.size());
    groups_.push_back(std::move(group));
  }
  attach_arenas();
}

void Optimizer::add_group(ParameterGroup group) {
  check_group(group, groups_);
  state_.emplace_back(group.parameters.size());
  groups_.push_back(std::move(group));
  attach_arenas();
}

void Optimizer::attach_arenas() {
  const auto former = std::move(arenas_);  // keeps them alive until the end
  arenas_.clear();
  NamedTensors homeless;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      if (!parameter.tensor.requires_grad()) continue;
      std::shared_ptr<GradientArena> arena = GradientArena::of(parameter.tensor);
      if (!arena) {
        homeless.push_back(parameter);
      } else if (std::find(arenas_.begin(), arenas_.end(), arena) == arenas_.end()) {
        arenas_.push_back(std::move(arena));
      }
    }
  }
  for (const auto& arena : arenas_) {
    if (arena->stale()) arena->refresh();
  }
  const bool f32_slots = !former.empty() && former.front()->f32_slots();
  auto arena = GradientArena::attach(homeless, f32_slots);
  if (!arena->parameters().empty()) arenas_.push_back(std::move(arena));
}

void Optimizer::refresh() {
  attach_arenas();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      for (Tensor& moment : state_[g][i].moments) {
        if (moment.defined() && moment.device() != parameter.device()) {
          moment = copy_like(moment, parameter);
        }
      }
      auto& master = parameter.meta().master;
      if (master && master->device() != parameter.device()) {
        *master = copy_like(*master, parameter);
      }
    }
  }
}

void Optimizer::set_lr(double lr) {
  for (ParameterGroup& group : groups_) group.lr = lr;
}

void Optimizer::set_master_weights(bool value) {
  master_weights_ = value;
  if (value) return;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) parameter.tensor.meta().master = nullptr;
  }
}

StepResult Optimizer::step(const StepOptions& options) {
  GradientReport report;
  if (options.check || options.max_gradient_norm > 0) report = check();
  return options.check && !report.finite() ? skip(report, options) : update(report, options);
}

GradientReport Optimizer::check() const {
  struct List {
    Device device;
    std::vector<TensorView> gradients;
    std::vector<const std::string*> names;
  };
  std::vector<List> lists;
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      if (!has_gradient(tensor)) continue;
      const Device device = tensor.device();
      auto list = std::find_if(lists.begin(), lists.end(),
                               [&](const List& other) { return other.device == device; });
      if (list == lists.end()) list = lists.insert(list, List{device, {}, {}});
      list->gradients.push_back(*tensor.meta().grad);
      list->names.push_back(&name);
    }
  }

  GradientReport report;
  report.squared_norm = 0.0;
  for (const List& list : lists) {
    const kernels::GradientCheck found = kernels::check_gradients(list.gradients);
    report.squared_norm += found.squared_norm;
    if (found.first_nonfinite < 0 || !report.finite()) continue;
    report.culprit = *list.names[static_cast<std::size_t>(found.first_nonfinite)];
    report.is_nan = found.is_nan;
    report.nonfinite_count = found.nonfinite_count;
  }
  return report;
}

void Optimizer::add_to_batches(std::size_t group, std::size_t index, std::vector<Batch>& batches,
                               std::vector<Tensor>& temporaries) {
  const Tensor& parameter = groups_[group].parameters[index].tensor;
  core::GradMeta& meta = parameter.meta();
  State& state = state_[group][index];

  kernels::UpdateEntry entry;
  entry.weight = parameter;
  entry.gradient = *meta.grad;
  if (!same_layout(entry.gradient, entry.weight)) {
    temporaries.push_back(Tensor::empty_strided(parameter.shape(), parameter.strides(),
                                                entry.gradient.dtype, parameter.device()));
    kernels::copy(entry.gradient, temporaries.back());
    entry.gradient = temporaries.back();
  }
  if (master_weights_ && core::is_half(parameter.dtype())) {
    if (!meta.master) meta.master = std::make_shared<Tensor>(copy_like(parameter, parameter));
    entry.master = *meta.master;
  }
  const std::size_t moments = moment_names().size();
  for (std::size_t m = 0; m < moments; ++m) {
    if (state.moments[m].defined()) continue;
    state.moments[m] = state_like(parameter);
    kernels::fill(state.moments[m], 0.0);
  }
  if (moments > 0) entry.moment1 = state.moments[0];
  if (moments > 1) entry.moment2 = state.moments[1];

  auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& other) {
    return other.device == parameter.device() && other.step == state.steps + 1;
  });
  if (batch == batches.end()) {
    batch = batches.insert(batch, Batch{parameter.device(), state.steps + 1, {}});
  }
  batch->entries.push_back(entry);
}

StepResult Optimizer::update(const GradientReport& report, const StepOptions& options) {
  StepResult result;
  result.gradient_norm = std::sqrt(report.squared_norm) * std::abs(options.gradient_scale);
  if (options.max_gradient_norm > 0 && result.gradient_norm > options.max_gradient_norm) {
    result.clip_coefficient = options.max_gradient_norm / (result.gradient_norm + 1e-6);
  }
  const double scale = options.gradient_scale * result.clip_coefficient;

  std::vector<Tensor> temporaries;
  std::vector<std::vector<Batch>> batches(
      groups_.size());  // all memory is there before anything is written
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      if (has_gradient(groups_[g].parameters[i].tensor)) {
        add_to_batches(g, i, batches[g], temporaries);
      }
    }
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const Batch& batch : batches[g]) {
      update_entries(groups_[g], batch.entries, scale, batch.step);
    }
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      if (!has_gradient(parameter)) continue;
      parameter.storage()->bump_version();
      ++state_[g][i].steps;
    }
  }
  ++steps_;
  finish(options);
  return result;
}

StepResult Optimizer::skip(const GradientReport& report, const StepOptions& options) {
  StepResult result;
  result.applied = false;
  result.culprit = report.culprit;
  result.reason = report.describe();
  finish(options);
  return result;
}

void Optimizer::finish(const StepOptions& options) {
  if (!options.keep_gradients) clear_grad();
  const bool stale =
      std::any_of(arenas_.begin(), arenas_.end(), [](const auto& arena) { return arena->stale(); });
  if (stale) refresh();
}

void Optimizer::clear_grad() {
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) Tensor(parameter.tensor).clear_grad();
  }
}

}  // namespace cairn::optim
