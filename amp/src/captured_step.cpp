#include "cairn/amp/captured_step.h"

#include <optional>
#include <set>
#include <string>

#include "amp_impl.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/log.h"
#include "cairn/kernels/copy.h"

namespace cairn::amp {

namespace {

/// "[32, 1, 28, 28] f32, [32] i64": what a graph is recorded for.
std::string describe(const CapturedStep::Inputs& inputs) {
  std::string text;
  for (const Tensor& x : inputs) {
    text += core::str(text.empty() ? "" : ", ", x.shape(), " ", x.dtype());
    if (!x.is_contiguous()) text += core::str(" with strides ", x.strides());
  }
  return text;
}

}  // namespace

struct CapturedStep::Impl {
  Amp precision;
  Loss loss;
  CapturedStepOptions options;
  Device device;
  std::optional<core::Graph> graph;  // none on the CPU
  std::string captured_for;          // inputs
  std::set<std::string> told;        // of other inputs
  int warmed_up = 0;
  std::vector<std::uint64_t> fingerprint;  // after the last warm-up
  Inputs buffers;                          // that the graph reads
  Tensor graph_loss, last_loss;            // that the graph writes; of the last step
  std::int64_t steps = 0;

  Amp::Impl& amp() { return *precision.impl_; }
  void run_as_always(const Inputs& inputs);
  void run_captured(const Inputs& inputs);
  void capture();
  void replay(const Inputs& inputs);
  std::vector<std::uint64_t> fingerprint_now();
};

void CapturedStep::Impl::run_as_always(const Inputs& inputs) {
  const Tensor loss_now = loss(inputs);
  precision.backward(loss_now);
  (void)precision.step(options.step);  // what it did is known to the device alone: report()
  last_loss = loss_now.detach();
}

std::vector<std::uint64_t> CapturedStep::Impl::fingerprint_now() {
  std::vector<std::uint64_t> words;
  const auto add = [&](const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) {
      words.push_back(reinterpret_cast<std::uintptr_t>(tensor.raw_data()));
      words.push_back(tensor.requires_grad());
    }
  };
  for (nn::Module* model : amp().models) {
    for (const auto& [name, module] : model->modules()) words.push_back(module->training());
    add(model->parameters());
    add(model->buffers());
  }
  for (const void* address : amp().device->addresses()) {
    words.push_back(reinterpret_cast<std::uintptr_t>(address));
  }
  optim::OptimizerAccess(amp().only_optimizer()).add_fingerprint(words);
  return words;
}

void CapturedStep::Impl::capture() {
  if (autograd::autocast_state().enabled) {
    core::fail<core::Unsupported>("capture",
                                  "expected a step outside of an autocast region, which ",
                                  "keeps copies of weights for the next, got one inside (open the "
                                  "region inside of the step's function)");
  }
  const std::int64_t steps_before = amp().steps;
  try {
    graph->capture([&] { run_as_always(buffers); });
  } catch (...) {
    amp().steps = steps_before;
    amp().contributions.end({0});  // half a step
    amp().only_optimizer().clear_grad();
    throw;
  }
  amp().steps = steps_before;
  graph_loss = last_loss;
}

void CapturedStep::Impl::replay(const Inputs& inputs) {
  graph->follow_last_replay();  // which reads the buffers
  for (std::size_t i = 0; i < inputs.size(); ++i) kernels::copy(inputs[i], buffers[i]);
  graph->replay();
  ++amp().steps;
  last_loss = graph_loss;
  optim::OptimizerAccess(amp().only_optimizer()).note_replay();
  for (nn::Module* model : amp().models) {
    for (const auto& [name, tensor] : model->buffers()) tensor.storage()->bump_version();
  }
}

void CapturedStep::Impl::run_captured(const Inputs& inputs) {
  optim::OptimizerAccess(amp().only_optimizer()).prepare_replay();
  const bool unchanged = fingerprint == fingerprint_now();
  if (graph->captured() && unchanged) return replay(inputs);
  last_loss = Tensor();
  if (graph->captured()) {
    log::info("amp: the step changed and is captured anew");
    graph_loss = Tensor();
    graph.emplace(device);
    warmed_up = 0;
  }
  if (warmed_up < options.warm_up || !unchanged) {
    graph->warm_up([&] { run_as_always(inputs); });
    ++warmed_up;
    fingerprint = fingerprint_now();
    return;
  }
  if (buffers.empty()) {
    for (const Tensor& x : inputs) buffers.push_back(Tensor::empty_like(x));
  }
  capture();
  replay(inputs);
}

CapturedStep::CapturedStep(const Amp& precision, Loss loss, const CapturedStepOptions& options, int)
    : impl_(std::make_unique<Impl>(Impl{precision, std::move(loss), options})) {
  CAIRN_CHECK(options.warm_up >= 1, "captured_step", "expected a warm_up of at least 1, got ",
              options.warm_up);
  impl_->precision.set_capturable(true);
  impl_->device = optim::OptimizerAccess(impl_->amp().only_optimizer()).found_inf().device;
  if (impl_->device.is_cuda()) impl_->graph.emplace(impl_->device);
}
CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

void CapturedStep::run(const Inputs& inputs) {
  Impl& s = *impl_;
  CAIRN_CHECK(s.precision.capturable(), "captured_step",
              "expected a capturable handle, got one that is so no longer (set_capturable(true))");
  const std::string shape = s.graph ? describe(inputs) : std::string();
  if (s.captured_for.empty()) s.captured_for = shape;
  if (s.graph && shape == s.captured_for) {
    s.run_captured(inputs);
  } else {
    if (s.graph && s.told.insert(shape).second) {
      log::info("amp: a step of {} is not captured, {} is", shape, s.captured_for);
    }
    s.run_as_always(inputs);
  }
  if (s.options.report_every == 0 || ++s.steps % s.options.report_every != 0) return;
  if (const optim::StepResult said = s.precision.report(); !said.applied) {
    log::warn("amp: {}", said.reason);
  }
}

Tensor CapturedStep::loss() const {
  CAIRN_CHECK(impl_->last_loss.defined(), "captured_step",
              "expected a step before its loss is asked for, got none");
  Tensor copy = Tensor::empty_like(impl_->last_loss);
  kernels::copy(impl_->last_loss, copy);
  return copy;
}

bool CapturedStep::captured() const {
  return impl_->graph && impl_->graph->captured();
}

}  // namespace cairn::amp
