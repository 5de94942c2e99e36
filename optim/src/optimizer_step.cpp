// Pass 2: clipping, the update or the skip.
#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/work_observer.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/optimizer_access.h"
#include "layout.h"
#include "state_window.h"

namespace cairn::optim {

namespace {

/// torch's: 1 where the norm is within the bound.
double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1.0;
}

void check_options(const GradientReport& report, std::size_t parameters,
                   const StepOptions& options) {
  CAIRN_CHECK(!report.checked() || report.norms.front().values.size() == parameters, "optimizer",
              "expected a report of this optimizer's ", parameters, " parameters, got one of ",
              report.norms.front().values.size(), " (check again after add_group)");
  CAIRN_CHECK(std::isfinite(options.gradient_scale), "optimizer",
              "expected a finite gradient_scale, got ", options.gradient_scale);
  CAIRN_CHECK(options.collapse_after >= 0, "optimizer", "expected a collapse_after >= 0, got ",
              options.collapse_after);
  CAIRN_CHECK(options.max_gradient_norm >= 0, "optimizer",
              "expected a max_gradient_norm >= 0, got ", options.max_gradient_norm);
  if (options.max_gradient_norm == 0) return;
  CAIRN_CHECK(report.checked() && report.norm_type == options.norm_type, "optimizer",
              "expected a report with norms of type ", options.norm_type, " to clip by, got ",
              report.checked() ? core::str("norms of type ", report.norm_type) : "an unchecked one",
              " (begin_check with that norm_type)");
}

/// LARC as a factor and an L2 term of the gradient.
void apply_larc(const LarcOptions& options, const ParameterGroup& group, double weight_norm,
                double gradient_norm, kernels::UpdateEntry& entry) {
  if (weight_norm == 0 || gradient_norm == 0) return;
  double ratio = options.trust_coefficient * weight_norm /
                 (gradient_norm + group.weight_decay * weight_norm + options.eps);
  if (options.clip) ratio = std::min(ratio / group.lr, 1.0);
  entry.gradient_factor = ratio;
  entry.l2 = group.weight_decay * ratio;
}

[[noreturn]] void fail_nonfinite(const GradientReport& report) {
  core::fail<core::Error>("optimizer", "expected finite gradients, got ", report.describe(),
                          report.nonfinite.size() > 1
                              ? core::str(" and ", report.nonfinite.size() - 1, " more parameters")
                              : "");
}

}  // namespace

bool Optimizer::needs_report(const StepOptions& options) const {
  return options.check || options.max_gradient_norm > 0 || options.error_if_nonfinite || larc_ ||
         running_norm_type() || own_max_norm() > 0;
}

SharedStep::SharedStep(const std::vector<Optimizer*>& optimizers) {
  for (const Optimizer* optimizer : optimizers) {
    arenas_.insert(arenas_.end(), optimizer->arenas_.begin(), optimizer->arenas_.end());
  }
  for (const auto& arena : arenas_) arena->pull_foreign_changes();
}

SharedStep::~SharedStep() {
  for (const auto& arena : arenas_) arena->push_changes();
}

StepResult Optimizer::step(const StepOptions& options) {
  const SharedStep shared({this});
  wait_for_reductions();  // all ranks have then what some have: they refuse it together
  if (capturable()) return step_on_device(options, 0, {});
  check_scaler(0);
  prepare_gradients();
  GradientReport report;
  if (needs_report(options)) report = begin_own_check(options.norm_type).read();
  if (!options.check || report.finite()) return end_update(begin_update(report, options));
  StepResult skipped = skip(report, options);
  std::vector<std::string> names;
  for (const NonFinite& found : report.nonfinite) names.push_back(found.parameter);
  note_skip(skipped.reason, std::move(names), options.collapse_after);
  return skipped;
}

void Optimizer::note_skip(const std::string& reason, std::vector<std::string> parameters,
                          int collapse_after) {
  skips_.add(std::move(parameters));
  const int length = skips_.length();
  if (std::has_single_bit(static_cast<unsigned>(length))) {
    log::warn("{}: step skipped: {}{}", kind(), reason,
              length > 1 ? core::str(" (", length, " skipped in a row)") : std::string());
  }
  if (collapse_after == 0 || length < collapse_after) return;
  const SkipStreak streak = std::exchange(skips_, {});
  throw GradientCollapse(core::str("[optimizer] expected a finite step, got ", length,
                                   " skipped in a row. The gradients of ", streak.describe(),
                                   " were not finite each time. ", kCollapseAdvice, ")"),
                         streak.parameters());
}

/// The 2-norm of all gradients, each multiplied by its group's scale.
double Optimizer::scaled_norm(const GradientReport& report,
                              const std::vector<double>& scales) const {
  const std::vector<double>& norms = report.norms_of(2.0);
  double sum = 0.0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const double scale = scales[parameters_[i].group];
    sum += norms[i] * norms[i] * scale * scale;
  }
  return std::sqrt(sum);
}

/// The factor of each group's gradients, and what the result says of norms.
StepResult Optimizer::measure(const GradientReport& report, const StepOptions& options,
                              std::vector<double>& scales) const {
  const double unscale = std::abs(options.gradient_scale);
  StepResult result;
  result.gradient_norm = report.norm() * unscale;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const double norm = options.per_group_norm && report.checked() ? report.group_norms[g] * unscale
                                                                   : result.gradient_norm;
    const double coefficient = clip_coefficient(norm, options.max_gradient_norm);
    result.clip_coefficient = std::min(result.clip_coefficient, coefficient);
    scales.push_back(options.gradient_scale * coefficient);
  }
  if (own_max_norm() == 0) return result;

  double norm = result.gradient_norm * result.clip_coefficient;
  if (options.per_group_norm || report.norm_type != 2.0) norm = scaled_norm(report, scales);
  const double coefficient = norm > own_max_norm() ? own_max_norm() / norm : 1.0;
  result.clip_coefficient *= coefficient;
  for (double& scale : scales) scale *= coefficient;
  return result;
}

/// The f32 master or the remainder of a half parameter, as the options say; made where there is
/// none.
TensorView Optimizer::master_of(const Parameter& parameter) {
  const Tensor& weight = parameter.tensor;
  if (kernels::MasterWeight::of(weight) == nullptr) {
    kernels::MasterWeight::make(weight, state_options_.masters);
  }
  kernels::MasterWeight::change_storage(weight, state_options_.masters);
  if (parameter.part) kernels::MasterWeight::keep_part(weight, *parameter.part);
  kernels::MasterWeight::keep_in(weight, state_options_.place());
  const TensorView master = kernels::MasterWeight::peek(weight)->view_to_write();
  core::leave_to_file(master);  // it may have followed its weight
  return master;
}

kernels::UpdateEntry Optimizer::entry_of(Parameter& parameter, const Tensor& gradient,
                                         std::size_t moments, std::vector<Tensor>& temporaries) {
  const Tensor& tensor = parameter.tensor;
  kernels::UpdateEntry entry;
  entry.weight = parameter.part ? core::part_of_weight(tensor, *parameter.part) : tensor.view();
  entry.weight.version = nullptr;  // counted for all at the end
  entry.gradient = tensor.gradient_slot().holds_part()
                       ? gradient.view()
                       : in_part(laid_out_like(tensor, gradient, temporaries), parameter.part);
  if (master_weights_ && core::is_half(tensor.dtype())) entry.master = master_of(parameter);
  for (std::size_t m = 0; m < moments; ++m) {
    Tensor& moment = parameter.moments[m];
    if (!moment.defined()) {
      const StateForm form{state_options_.moments, state_options_.place()};
      moment = full_state(tensor, parameter.part, form, initial_moment());
    }
    (m == 0 ? entry.moment1 : entry.moment2) = moment;
  }
  return entry;
}

void Optimizer::add_to_batches(std::size_t index, const kernels::UpdateEntry& entry) {
  const Parameter& parameter = parameters_[index];
  const std::int64_t step = parameter.steps + 1;
  auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& other) {
    return other.entries.empty() || (other.group == parameter.group && other.step == step &&
                                     other.count.id() == parameter.count.id() &&
                                     other.entries.front().weight.device == entry.weight.device);
  });
  if (batch == batches_.end()) batch = batches_.insert(batch, Batch{});
  batch->group = parameter.group;
  batch->step = step;
  batch->count = parameter.count;
  batch->entries.push_back(entry);
  batch->parameters.push_back(index);
  batch->elements.push_back(
      parameter.part.value_or(core::ElementRange{0, parameter.tensor.numel()}));
}

/// All memory is there before anything is written.
void Optimizer::fill_batches(const GradientReport& report, const std::vector<double>& scales,
                             std::vector<Tensor>& temporaries) {
  const std::size_t moments = moment_names().size();
  const std::optional<double> running = running_norm_type();
  const double* running_norms = running ? report.norms_of(*running).data() : nullptr;
  const double* gradient_norms = larc_ ? report.norms_of(2.0).data() : nullptr;
  for (Batch& batch : batches_) {
    batch.entries.clear();
    batch.parameters.clear();
    batch.elements.clear();
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const Tensor* gradient = gradient_of(parameter);
    if (gradient == nullptr) continue;
    const ParameterGroup& group = groups_[parameter.group];
    const double scale = std::abs(scales[parameter.group]);
    temporaries.push_back(*gradient);  // another optimizer's step may lay the arena out anew
    kernels::UpdateEntry entry = entry_of(parameter, *gradient, moments, temporaries);
    if (running) {
      entry.norm = parameter.next_norm =
          running_norm(group, parameter.norm, running_norms[i] * scale, parameter.steps + 1);
    }
    if (larc_) apply_larc(*larc_, group, report.weight_norms[i], gradient_norms[i] * scale, entry);
    add_to_batches(i, entry);
  }
  if (lie_elsewhere(state_options_)) cut_batches();
}

Optimizer::Call Optimizer::call_of(const Batch& batch, const std::vector<double>& scales) const {
  const double decay = larc_ ? 0.0 : groups_[batch.group].weight_decay;
  return {scales[batch.group], batch.step, {}, decay};
}

std::vector<const Optimizer::Entries*> Optimizer::lists() const {
  std::vector<const Entries*> all;
  for (const Batch& batch : batches_) {
    if (!batch.entries.empty()) all.push_back(&batch.entries);
  }
  return all;
}

/// Once something is written, an error leaves weights of two steps. Kernels that fail may have
/// written.
void Optimizer::apply(const std::function<void()>& work) {
  try {
    work();
    stopped_.clear();
  } catch (const core::DeviceError& error) {
    stopped_ = error.what();
    throw;
  } catch (const std::exception& error) {
    if (!stopped_.empty()) stopped_ = error.what();
    throw;
  }
}

void Optimizer::has_written() {
  if (stopped_.empty()) stopped_ = "unknown";  // until it ends
}

void Optimizer::run_blocks(const UpdateBlock& update_block) {
  StateWindow window(lists(), lie_elsewhere(state_options_));
  for (const Batch& batch : batches_) {
    if (batch.entries.empty()) return;
    update_block(batch, window.enter());
    has_written();
    window.leave();
  }
}

void Optimizer::run_batches(const std::vector<double>& scales, kernels::DeviceStep device) {
  run_blocks([&](const Batch& batch, const Entries& entries) {
    Call call = call_of(batch, scales);
    if (capturable()) device.lr = device_->rates[batch.group], device.step = batch.count;
    call.device = device;
    update_group(groups_[batch.group], entries, call);
  });
}

void Optimizer::run_update(const std::vector<double>& scales) {
  const bool of_parts = partition_.cuts_any() || lie_elsewhere(state_options_);
  if (of_parts && updates_in_two_passes()) {
    run_batches_of_parts(scales);
  } else {
    run_batches(scales, {});
  }
  if (partition_.cuts_any()) partition_.gather(updated());
}

void Optimizer::check_ended() const {
  CAIRN_CHECK(stopped_.empty(), "optimizer",
              "expected an update that has ended, got one that stopped after a part of the weights "
              "(resume from a checkpoint): ",
              stopped_);
}

std::vector<Tensor> Optimizer::updated() const {
  std::vector<Tensor> weights;
  for (const Parameter& parameter : parameters_) {
    if (gradient_of(parameter) != nullptr) weights.push_back(parameter.tensor);
  }
  return weights;
}

/// They agree with their masters, or are their own values from now on.
void Optimizer::tell_of_update() const {
  const std::vector<Tensor> weights = updated();
  if (!master_weights_) std::for_each(weights.begin(), weights.end(), kernels::MasterWeight::drop);
  kernels::weights_written(weights);
}

/// From the reductions of the gradients.
void Optimizer::show_flows(core::WorkSpan& span) const {
  for (std::size_t i = 0; span.observed() && i < parameters_.size(); ++i)
    span.add_flow(parameters_[i].tensor.gradient_slot().flow());
}

StepResult Optimizer::update(const GradientReport& report, const StepOptions& options) {
  wait_for_reductions();
  check_scaler(0);
  prepare_gradients();
  return end_update(begin_update(report, options));
}

Optimizer::Update Optimizer::begin_update(const GradientReport& own_report,
                                          const StepOptions& options) {
  const GradientReport report = complete(own_report);
  check_options(report, parameters_.size(), options);
  if (options.error_if_nonfinite && !report.finite()) fail_nonfinite(report);
  Update update{.options = options, .result = {}, .scales = {}, .temporaries = {}};
  if (!has_gradient()) return update;
  update.result = measure(report, options, update.scales);
  tell_ranks_of_failure([&] {
    follow();
    fill_batches(report, update.scales, update.temporaries);
  });
  return update;
}

/// Ranks whose weights would differ hear of it.
void Optimizer::tell_ranks_of_failure(const std::function<void()>& work) const {
  try {
    work();
  } catch (const core::CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    partition_.update_failed(error.what());
    throw;
  }
}

StepResult Optimizer::end_update(const Update& update) {
  if (update.scales.empty()) return leave(kNoGradient, update.options);
  core::WorkSpan span(core::ObservedWork::Kind::update, kind(),
                      parameters_.front().tensor.device());
  show_flows(span);
  tell_ranks_of_failure([&] { apply([&] { run_update(update.scales); }); });
  tell_of_update();
  for (Parameter& parameter : parameters_) {
    if (gradient_of(parameter) == nullptr) continue;
    parameter.norm = parameter.next_norm;
    ++parameter.steps;
  }
  ++steps_;
  skips_.clear();
  finish(update.options);
  return update.result;
}

StepResult Optimizer::skip(const GradientReport& own_report, const StepOptions& options) {
  const GradientReport report = complete(own_report);
  if (options.error_if_nonfinite && !report.finite()) fail_nonfinite(report);
  StepResult result = leave(report.describe(), options);
  result.culprit = report.culprit;
  return result;
}

/// A step that is not applied.
StepResult Optimizer::leave(std::string reason, const StepOptions& options) {
  finish(options);
  StepResult result;
  result.applied = false;
  result.reason = std::move(reason);
  return result;
}

/// The step is done: what there is no memory to lay out anew, the next backward does.
void Optimizer::finish(const StepOptions& options) {
  if (!options.keep_gradients) clear_grad();
  try {
    refresh_if_stale();
  } catch (const core::Error& error) {
    log::warn("{}: gradients are laid out anew by the next backward: {}", kind(), error.what());
  }
}

}  // namespace cairn::optim
