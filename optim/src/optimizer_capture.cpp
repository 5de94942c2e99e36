// A step without the host: its numbers lie on the device.
#include <algorithm>
#include <bit>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"

namespace cairn::optim {

using core::fail;
using core::Unsupported;

struct Optimizer::DeviceState {
  Device device;
  Tensor found_inf, clip, applied;  // f32, f64, i32 [1]
  Tensor overflowed;                // f32 [parameters]; not 0: it did since somebody asked
  std::vector<Tensor> rates;        // f64 [1], by group
  std::vector<double> written;      // what the host has put there
  /// i32 [1], by group and parameter: updates so far. Parameters that had gradients in the same
  /// steps share one.
  std::vector<std::vector<Tensor>> counts;
};

namespace {

Tensor number_on(Device device, double value, DType dtype) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  return Tensor::full({1}, value, dtype, device);
}

std::int64_t read(const Tensor& count) {
  return static_cast<std::int64_t>(count.item());
}

std::uint64_t address(const Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<std::uintptr_t>(tensor.raw_data()) : 0;
}

}  // namespace

std::int64_t Optimizer::steps() const {
  return capturable() ? read(device_->applied) : steps_;
}

std::int64_t Optimizer::steps_of(std::size_t group, std::size_t index) const {
  return capturable() ? read(device_->counts[group][index]) : state_[group][index].steps;
}

/// From what the host knows.
std::shared_ptr<Optimizer::DeviceState> Optimizer::make_device_state() const {
  auto state = std::make_shared<DeviceState>();
  std::int64_t parameters = 0;
  std::vector<std::pair<std::int64_t, Tensor>> made;  // a count for each number of steps
  state->device = groups_.front().parameters.empty()
                      ? core::default_device()
                      : groups_.front().parameters.front().tensor.device();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<Tensor>& counts = state->counts.emplace_back();
    for (std::size_t i = 0; i < state_[g].size(); ++i, ++parameters) {
      const auto& [name, tensor] = groups_[g].parameters[i];
      if (tensor.device() != state->device) {
        fail<Unsupported>("optimizer", "expected the parameters of a capturable optimizer on one ",
                          "device, got '", name, "' on ", tensor.device(), " beside others on ",
                          state->device);
      }
      const std::int64_t steps = state_[g][i].steps;
      auto count = std::find_if(made.begin(), made.end(),
                                [&](const auto& other) { return other.first == steps; });
      if (count == made.end()) {
        count = made.insert(
            count, {steps, number_on(state->device, static_cast<double>(steps), DType::i32)});
      }
      counts.push_back(count->second);
    }
    state->rates.push_back(number_on(state->device, groups_[g].lr, DType::f64));
    state->written.push_back(groups_[g].lr);
  }
  state->found_inf = number_on(state->device, 0.0, DType::f32);
  state->clip = number_on(state->device, 1.0, DType::f64);
  state->applied = number_on(state->device, static_cast<double>(steps_), DType::i32);
  state->overflowed = Tensor::zeros({parameters}, DType::f32, state->device);
  return state;
}

void Optimizer::set_capturable(bool value) {
  if (value == capturable()) return;
  if (!value) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (std::size_t i = 0; i < state_[g].size(); ++i) state_[g][i].steps = steps_of(g, i);
    }
    steps_ = steps();
    device_ = nullptr;
    return;
  }
  if (running_norm_type() || larc_) {
    fail<Unsupported>("optimizer",
                      "expected a rule whose norms need no host to be capturable, got ",
                      larc_ ? "LARC around " : "", kind());
  }
  device_ = make_device_state();
}

void Optimizer::check_capturable(const StepOptions& options) const {
  const auto refuse = [](const char* what) {
    fail<Unsupported>("optimizer", "expected options that a capturable step has, got ", what,
                      " (set_capturable(false))");
  };
  if (options.error_if_nonfinite) refuse("error_if_nonfinite, which the host would have to read");
  if (options.max_gradient_norm > 0 && (options.per_group_norm || options.norm_type != 2)) {
    refuse("clipping by group or by another norm than the 2-norm of all");
  }
  if (options.max_gradient_norm > 0 && own_max_norm() > 0) {
    refuse("max_gradient_norm beside a rule that clips by itself");
  }
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      const core::GradientSlot* slot = tensor.gradient_slot_or_null();
      if (slot != nullptr && slot->reducer()) refuse("gradients that ranks reduce");
    }
  }
}

/// Where the parameters moved to another device, all of it moves.
void Optimizer::write_rates() {
  const auto moved = [&](const ParameterGroup& group) {
    return !group.parameters.empty() && group.parameters.front().tensor.device() != device_->device;
  };
  if (std::any_of(groups_.begin(), groups_.end(), moved)) {
    set_capturable(false);
    set_capturable(true);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (device_->written[g] == groups_[g].lr) continue;
    core::refuse_in_capture("optimizer", "a learning rate that changes inside of the step");
    kernels::fill(device_->rates[g], groups_[g].lr);
    device_->written[g] = groups_[g].lr;
  }
}

/// Fills batches_ and returns the counts that their `step` is an index of. Parameters that no
/// longer have gradients in the same steps get counts of their own.
std::vector<TensorView> Optimizer::count_on_device() {
  struct Count {
    Tensor own;
    std::size_t members = 0;
    std::vector<Tensor*> stepped;
  };
  std::vector<Count> counts;
  const auto count_of = [&](const Tensor& tensor) {
    const auto found = std::find_if(counts.begin(), counts.end(), [&](const Count& count) {
      return count.own.id() == tensor.id();
    });
    return found != counts.end() ? found : counts.insert(found, Count{tensor, 0, {}});
  };
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const auto count = count_of(device_->counts[g][i]);
      ++count->members;
      if (gradient_of(g, i) != nullptr) count->stepped.push_back(&device_->counts[g][i]);
    }
  }
  std::vector<TensorView> stepped;
  for (Count& count : counts) {
    if (count.stepped.empty()) continue;
    if (count.stepped.size() < count.members) {
      core::refuse_in_capture("optimizer", "a step in which fewer parameters have gradients");
      const Tensor own = number_on(device_->device, 0.0, DType::i32);
      kernels::copy(count.own, own);
      for (Tensor* place : count.stepped) *place = own;
      count.own = own;
    }
    stepped.push_back(count.own);
  }
  return stepped;
}

void Optimizer::update_on_device(const StepOptions& options, const TensorView& loss_scale,
                                 const TensorView& clip, const TensorView& found_inf) {
  const std::vector<TensorView> counts = count_on_device();
  const std::size_t moments = moment_names().size();
  std::vector<Tensor> temporaries;
  for (Batch& batch : batches_) batch.entries.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor* gradient = gradient_of(g, i);
      if (gradient == nullptr) continue;
      const auto count = std::find_if(counts.begin(), counts.end(), [&](const TensorView& view) {
        return view.data == device_->counts[g][i].raw_data();
      });
      add_to_batches(g, count - counts.begin(), entry_of(g, i, *gradient, moments, temporaries));
    }
  }
  for (const TensorView& count : counts) kernels::advance_step(count, found_inf);
  kernels::advance_step(device_->applied, found_inf);
  for (const Batch& batch : batches_) {
    if (batch.entries.empty()) break;
    const kernels::DeviceStep device{.lr = device_->rates[batch.group],
                                     .step = counts[static_cast<std::size_t>(batch.step)],
                                     .loss_scale = loss_scale,
                                     .found_inf = found_inf,
                                     .clip = clip};
    update_entries(groups_[batch.group], batch.entries, {options.gradient_scale, 1, device});
  }
}

StepResult Optimizer::step_on_device(const StepOptions& options, std::uint64_t scaler,
                                     const TensorView& loss_scale) {
  CAIRN_CHECK(capturable(), "optimizer", "expected a capturable optimizer, got another ",
              "(set_capturable(true))");
  check_scaler(scaler);
  check_capturable(options);
  prepare_gradients();
  StepResult result;
  result.applied = has_gradient();
  if (!result.applied) {
    result.reason = kNoGradient;
    finish(options);
    return result;
  }
  result.known = false;
  write_rates();
  const double max_norm = std::max(options.max_gradient_norm, own_max_norm());
  const TensorView clip = max_norm > 0 ? device_->clip.view() : TensorView();
  const bool checks = options.check || max_norm > 0;
  if (checks) {
    const TensorView none = device_->overflowed.view().slice(0, 0, 0);
    std::vector<TensorView> gradients;  // of each parameter
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (std::size_t i = 0; i < state_[g].size(); ++i) {
        const Tensor* gradient = gradient_of(g, i);
        gradients.push_back(gradient != nullptr ? gradient->view() : none);
      }
    }
    kernels::find_nonfinite(gradients, {.found_inf = device_->found_inf,
                                        .each = device_->overflowed,
                                        .clip = clip,
                                        .max_norm = max_norm,
                                        .gradient_scale = options.gradient_scale,
                                        .eps = own_max_norm() > 0 ? 0.0 : 1e-6,
                                        .loss_scale = loss_scale});
  }
  update_on_device(options, loss_scale, clip,
                   options.check ? device_->found_inf.view() : TensorView());
  note_updates();
  finish(options);
  return result;
}

TensorView Optimizer::found_inf() const {
  return device_->found_inf;
}

std::vector<std::string> Optimizer::take_overflowed() {
  std::vector<std::string> names;
  const std::vector<double> flags = device_->overflowed.to_vector<double>();
  std::size_t parameter = 0;
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& one : group.parameters) {
      if (flags[parameter++] != 0.0) names.push_back(one.name);
    }
  }
  if (!names.empty()) kernels::fill(device_->overflowed, 0.0);
  return names;
}

void Optimizer::prepare_replay() {
  write_rates();
  for (const ParameterGroup& group : groups_) {
    for (const NamedTensor& parameter : group.parameters) {
      kernels::MasterWeight::of(parameter.tensor);
    }
  }
}

void Optimizer::note_replay() {
  std::vector<Tensor> written;
  for (const ParameterGroup& group : groups_) {
    for (const auto& [name, tensor] : group.parameters) {
      if (tensor.requires_grad()) written.push_back(tensor);
    }
  }
  kernels::weights_written(written);
}

void Optimizer::add_fingerprint(std::vector<std::uint64_t>& words) const {
  for (const auto& arena : arenas_) words.push_back(arena->generation());
  words.push_back(master_weights_);
  for (const Tensor& number :
       {device_->found_inf, device_->clip, device_->applied, device_->overflowed}) {
    words.push_back(address(number));
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const ParameterGroup& group = groups_[g];
    words.push_back(std::bit_cast<std::uint64_t>(group.weight_decay));
    for (const auto& option : {group.beta1, group.beta2, group.eps, group.momentum}) {
      words.push_back(option ? std::bit_cast<std::uint64_t>(*option) : 0);
    }
    words.push_back(address(device_->rates[g]));
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor& parameter = group.parameters[i].tensor;
      const auto* master = kernels::MasterWeight::peek(parameter);
      const core::GradientSlot* slot = parameter.gradient_slot_or_null();
      words.insert(words.end(),
                   {address(parameter), static_cast<std::uint64_t>(parameter.dtype()),
                    parameter.requires_grad(), address(master ? master->tensor() : Tensor()),
                    address(slot ? slot->memory() : Tensor()), slot && slot->holds_gradient(),
                    address(device_->counts[g][i]), address(state_[g][i].moments[0]),
                    address(state_[g][i].moments[1])});
    }
  }
}

}  // namespace cairn::optim
