#include "cairn/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "cairn/core/error.h"
#include "layout.h"

namespace cairn::optim {

namespace {

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

void check_rates(const ParameterGroup& group) {
  CAIRN_CHECK(std::isfinite(group.lr) && group.lr >= 0, "optimizer",
              "expected a learning rate >= 0, got ", group.lr);
  CAIRN_CHECK(std::isfinite(group.weight_decay) && group.weight_decay >= 0, "optimizer",
              "expected a weight decay >= 0, got ", group.weight_decay);
  for (const auto& beta : {group.beta1, group.beta2}) {
    CAIRN_CHECK(!beta || (*beta >= 0 && *beta < 1), "optimizer", "expected betas in [0, 1), got ",
                *beta);
  }
  for (const auto& value : {group.eps, group.momentum}) {
    CAIRN_CHECK(!value || (*value >= 0 && std::isfinite(*value)), "optimizer",
                "expected an eps and a momentum >= 0, got ", *value);
  }
}

void check_group(const ParameterGroup& group, const std::vector<ParameterGroup>& others) {
  check_rates(group);
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

Optimizer::Optimizer(std::vector<ParameterGroup> groups) {
  CAIRN_CHECK(!groups.empty(), "optimizer", "expected at least one parameter group, got none");
  for (ParameterGroup& group : groups) {
    check_group(group, groups_);
    state_.emplace_back(group.parameters.size());
    groups_.push_back(std::move(group));
  }
  const bool any = std::any_of(groups_.begin(), groups_.end(), [](const ParameterGroup& group) {
    return !group.parameters.empty();
  });
  CAIRN_CHECK(any, "optimizer",
              "expected parameters to train, got none (model.parameters() of a "
              "model whose layers are not registered? add_module or nn::Child registers one)");
  attach_arenas();
}

void Optimizer::add_group(ParameterGroup group) {
  check_group(group, groups_);
  const bool was_capturable = capturable();
  set_capturable(false);
  state_.emplace_back(group.parameters.size());
  groups_.push_back(std::move(group));
  attach_arenas();
  set_capturable(was_capturable);
}

void Optimizer::attach_arenas() {
  const auto former = std::move(arenas_);  // keeps them alive until the end
  arenas_.clear();
  NamedTensors homeless;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
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
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      parameter.tensor.gradient_slot().claim(identity_);  // unless one that it replaces still lives
    }
  }
  auto arena = GradientArena::attach(homeless, f32_slots);
  if (!arena->parameters().empty()) arenas_.push_back(std::move(arena));
  for (const auto& used : arenas_) used->accumulate_in_f32(master_weights_);
  partition_ = partition();
}

Optimizer::~Optimizer() {
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      core::GradientSlot& slot = parameter.tensor.gradient_slot();
      if (!slot.has_sum()) slot.release_sum();  // else another optimizer may step it
    }
  }
}

void Optimizer::prepare() {
  const bool stale =
      std::any_of(arenas_.begin(), arenas_.end(), [](const auto& arena) { return arena->stale(); });
  if (stale) refresh();
  if (!master_weights_) return;
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      const bool lacks = tensor.requires_grad() && core::is_half(tensor.dtype()) &&
                         !kernels::MasterWeight::exists(tensor);
      if (lacks) kernels::MasterWeight::make(tensor, state_options_.masters);
    }
  }
  cut_state();
}

Partition Optimizer::partition() const {
  return Partition(groups_, updates_whole_tensors() || larc_ != nullptr);
}

OwnedRange Optimizer::own_part(std::size_t group, std::size_t index) const {
  std::size_t place = index;
  for (std::size_t g = 0; g < group; ++g) place += state_[g].size();
  return partition_.own_part(place);
}

namespace {

/// A state that is whole, or that of this part, becomes that of the part.
void cut_moment(Tensor& moment, const NamedTensor& parameter, const OwnedRange& part) {
  const bool is_whole = moment.shape() == parameter.tensor.shape();
  const bool is_part = part && moment.dims() == 1 && moment.numel() == part->size();
  if (part ? is_part : is_whole) return;
  CAIRN_CHECK(is_whole, "optimizer", "expected the state of '", parameter.name, "', ",
              part ? part->size() : parameter.tensor.numel(), " elements, got ", moment.numel(),
              ": what other ranks keep of it since it was sharded is not here (save the training "
              "state, and resume it in the other form)");
  moment = copy_state(parameter.tensor, part, moment, moment.dtype());
}

}  // namespace

void Optimizer::cut_state() {
  partition_ = partition();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const NamedTensor& parameter = groups_[g].parameters[i];
      const OwnedRange part = own_part(g, i);
      for (Tensor& moment : state_[g][i].moments) {
        if (moment.defined()) cut_moment(moment, parameter, part);
      }
      if (part) kernels::MasterWeight::keep_part(parameter.tensor, *part);
    }
  }
}

void Optimizer::refresh() {
  attach_arenas();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      State& state = state_[g][i];
      for (Tensor& moment : state.moments) {
        if (!moment.defined() || moment.device() == parameter.device()) continue;
        moment = copy_state(parameter, own_part(g, i), moment, moment.dtype());
      }
      kernels::MasterWeight::of(parameter);  // follows it to its device
    }
  }
  cut_state();
}

void Optimizer::check_not_moved() const {
  CAIRN_CHECK(
      !groups_.empty(), "optimizer",
      "expected an optimizer that stayed where it was, got one that was moved from (move it "
      "before amp, a Schedule or a LARC is given it, or keep it in a std::unique_ptr)");
}

double Optimizer::lr() const {
  check_not_moved();
  return groups_.front().lr;
}

void Optimizer::set_lr(double lr) {
  for (ParameterGroup& group : groups_) group.lr = lr;
}

void Optimizer::set_master_weights(bool value) {
  master_weights_ = value;
  for (const auto& arena : arenas_) arena->accumulate_in_f32(value);
  if (value) return;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      kernels::MasterWeight::drop(parameter.tensor);
    }
  }
}

void Optimizer::set_state_options(const StateOptions& options) {
  CAIRN_CHECK(options.moments == DType::f32 || options.moments == DType::bf16, "optimizer",
              "expected moments of f32 or bf16, got ", options.moments);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const auto& [name, tensor] = groups_[g].parameters[i];
      CAIRN_CHECK(options.masters == MasterStorage::f32 || tensor.dtype() != DType::f16,
                  "optimizer", "expected bf16 parameters for masters stored as remainders, got '",
                  name, "' of f16 (MasterStorage::f32)");
    }
  }
  state_options_ = options;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      for (Tensor& moment : state_[g][i].moments) {
        if (!moment.defined() || moment.dtype() == options.moments) continue;
        moment =
            copy_state(groups_[g].parameters[i].tensor, own_part(g, i), moment, options.moments);
      }
    }
  }
}

}  // namespace cairn::optim
