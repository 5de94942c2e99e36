#include <algorithm>
#include <cmath>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer_access.h"
#include "layout.h"

namespace cairn::optim {

namespace {

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

/// A state that is whole, or that of this part, becomes that of the part, beside its parameter.
void bring_along(Tensor& moment, const NamedTensor& parameter, const OwnedRange& part,
                 const StateForm& form, const std::string& former_folder) {
  const bool is_whole = moment.shape() == parameter.tensor.shape();
  const bool is_part = part && moment.dims() == 1 && moment.numel() == part->size();
  const bool fits = part ? is_part : is_whole;
  CAIRN_CHECK(fits || is_whole, "optimizer", "expected the state of '", parameter.name, "', ",
              part ? part->size() : parameter.tensor.numel(), " elements, got ", moment.numel(),
              ": what other ranks keep of it since it was sharded is not here (save the training "
              "state, and resume it in the other form)");
  const bool in_file = core::lies_in_file(moment);
  const bool is_placed =
      in_file == form.wants_file(moment) && (!in_file || form.place.folder == former_folder);
  const bool is_home = moment.device() == form.place.home_of(parameter.tensor.device());
  if (fits && moment.dtype() == form.dtype && is_home && is_placed) return;
  moment = copy_state(parameter.tensor, part, moment, form);
}

void check_masters(const StateOptions& options, const NamedTensor& parameter) {
  const Device device = parameter.tensor.device();
  if (options.masters == MasterStorage::f32 || options.place().home_of(device) == device) return;
  core::fail<core::Unsupported>("optimizer", "expected f32 masters of what the host updates, got ",
                                "remainders of '", parameter.name, "' on ", device,
                                " (MasterStorage::f32)");
}

}  // namespace

void Optimizer::take_group(ParameterGroup group) {
  check_rates(group);
  EachOnce once;
  for (const Parameter& parameter : parameters_) once.add("optimizer", "parameter", parameter);
  for (const NamedTensor& parameter : group.parameters) {
    check_dense_float("optimizer", "parameters", parameter);
    once.add("optimizer", "parameter", parameter);
  }
  for (const NamedTensor& parameter : group.parameters) {
    parameters_.push_back({parameter, groups_.size()});
  }
  groups_.push_back(std::move(group));
}

Optimizer::Optimizer(std::vector<ParameterGroup> groups) {
  CAIRN_CHECK(!groups.empty(), "optimizer", "expected at least one parameter group, got none");
  for (ParameterGroup& group : groups) take_group(std::move(group));
  CAIRN_CHECK(!parameters_.empty(), "optimizer",
              "expected parameters to train, got none (model.parameters() of a "
              "model whose layers are not registered? add_module or nn::Child registers one)");
  attach_arenas();
}

void Optimizer::add_group(ParameterGroup group) {
  take_group(std::move(group));
  const bool was_capturable = capturable();
  set_capturable(false);
  attach_arenas();
  set_capturable(was_capturable);
}

void Optimizer::attach_arenas() {
  const auto former = std::exchange(arenas_, {});  // keeps them alive until the end
  NamedTensors homeless;
  for (const Parameter& parameter : parameters_) {
    parameter.tensor.gradient_slot().claim(identity_);  // unless one that it replaces still lives
    std::shared_ptr<GradientArena> arena = GradientArena::of(parameter.tensor);
    if (!arena) {
      homeless.push_back(parameter);
    } else if (std::find(arenas_.begin(), arenas_.end(), arena) == arenas_.end()) {
      arenas_.push_back(std::move(arena));
    }
  }
  for (const auto& arena : arenas_) {
    if (arena->stale()) arena->refresh();
  }
  const bool f32_slots = !former.empty() && former.front()->f32_slots();
  auto arena = GradientArena::attach(homeless, f32_slots);
  if (!arena->parameters().empty()) arenas_.push_back(std::move(arena));
  for (const auto& used : arenas_) used->accumulate_in_f32(master_weights_);
  partition_ = partition();
}

Optimizer::~Optimizer() {
  for (const Parameter& parameter : parameters_) {
    core::GradientSlot& slot = parameter.tensor.gradient_slot();
    if (!slot.has_sum()) slot.release_sum();  // else another optimizer may step it
  }
}

void Optimizer::follow() {
  follow_from(state_options_.folder);
}

void Optimizer::follow_from(const std::string& former_folder) {
  const StateForm form{state_options_.moments, state_options_.place()};
  partition_ = partition();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    check_masters(state_options_, parameter);
    parameter.part = partition_.own_part(i);
    for (Tensor& moment : parameter.moments) {
      if (!moment.defined()) continue;
      bring_along(moment, parameter, parameter.part, form, former_folder);
    }
    if (parameter.part) kernels::MasterWeight::keep_part(parameter.tensor, *parameter.part);
    const auto* master = kernels::MasterWeight::peek(parameter.tensor);
    if (master == nullptr || master->storage() != state_options_.masters) continue;
    kernels::MasterWeight::keep_in(parameter.tensor, form.place);
  }
}

void Optimizer::refresh() {
  attach_arenas();
  for (const Parameter& parameter : parameters_) {
    kernels::MasterWeight::of(parameter.tensor);  // follows it to its device
  }
  follow();
}

void Optimizer::refresh_if_stale() {
  const bool stale =
      std::any_of(arenas_.begin(), arenas_.end(), [](const auto& arena) { return arena->stale(); });
  if (stale) refresh();
}

void OptimizerAccess::prepare() const {
  optimizer_.refresh_if_stale();
  if (!optimizer_.master_weights_) return;
  for (const auto& parameter : optimizer_.parameters_) {
    const Tensor& tensor = parameter.tensor;
    const bool lacks = tensor.requires_grad() && core::is_half(tensor.dtype()) &&
                       !kernels::MasterWeight::exists(tensor);
    if (lacks) kernels::MasterWeight::make(tensor, optimizer_.state_options_.masters);
  }
  optimizer_.follow();
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
  for (const Parameter& parameter : parameters_) kernels::MasterWeight::drop(parameter.tensor);
}

bool Optimizer::lie_elsewhere(const StateOptions& options) const {
  const kernels::StatePlace place = options.place();
  return !place.folder.empty() ||
         std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
           return place.home_of(parameter.tensor.device()) != parameter.tensor.device();
         });
}

void Optimizer::check_place(const StateOptions& options) const {
  for (const Parameter& parameter : parameters_) check_masters(options, parameter);
  if (capturable() && lie_elsewhere(options)) {
    core::fail<core::Unsupported>("optimizer", "expected states beside their parameters for ",
                                  "capturable steps, got ",
                                  options.folder.empty() ? "the host" : "the folder ",
                                  options.folder, " (set_capturable(false))");
  }
  if (options.folder.empty()) return;
  core::allocate_in_file(options.folder, core::kLeastInFile);  // it can be written to
}

void Optimizer::set_state_options(const StateOptions& options) {
  CAIRN_CHECK(options.moments == DType::f32 || options.moments == DType::bf16, "optimizer",
              "expected moments of f32 or bf16, got ", options.moments);
  for (const Parameter& parameter : parameters_) {
    CAIRN_CHECK(options.masters == MasterStorage::f32 || parameter.tensor.dtype() != DType::f16,
                "optimizer", "expected bf16 parameters for masters stored as remainders, got '",
                parameter.name, "' of f16 (MasterStorage::f32)");
  }
  check_place(options);
  const StateOptions former = std::exchange(state_options_, options);
  try {
    follow_from(former.folder);
  } catch (...) {
    state_options_ = former;
    throw;
  }
}

}  // namespace cairn::optim
