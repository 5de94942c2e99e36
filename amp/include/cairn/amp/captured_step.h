// A whole training step - forward, backward, check, update, loss scale - as one CUDA graph.
//
//   const auto loss_of = [&](const Tensor& x, const Tensor& y) {
//     return nn::cross_entropy(model(x), y);
//   };
//   amp::CapturedStep step(precision, loss_of);
//   for (const auto& batch : loader) step(batch.inputs, batch.labels);
//   log::info("loss {}, scale {}", step.loss().item(), precision.loss_scale());
//
// The first steps run as always; they make what lasts (masters, moments, tables, vendors' plans,
// the memory of a step). The next is recorded, and from then on a step copies its inputs into
// buffers of the graph's and replays it: one launch, and the host reads nothing. The bits are those
// of uncaptured steps, and so are the random numbers. On the CPU, and for inputs of another shape,
// layout or dtype than the first, the step runs as always (a line in the log for each such shape).
//
// Branches that the function takes on the host are frozen when it is recorded. Cairn records anew
// when it detects a loaded state, other groups or options than lr, frozen or cast parameters, or
// train() and eval(). Learning rates may change at any time, and uncaptured steps may come between.
//
// Over several ranks (Options::world = ddp.world()) the collectives are in the graph, and each rank
// has a CapturedStep of its own, which ends before the group does.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cairn/amp/amp.h"

namespace cairn::amp {

struct CapturedStepOptions {
  optim::StepOptions step;  // of each step
  int warm_up = 2;          // steps that run as always before one is recorded; at least 1
  /// After so many steps Amp::report() is called, and what was skipped is logged; 0: never.
  int report_every = 0;
};

class [[nodiscard]] CapturedStep {
 public:
  using Inputs = std::vector<Tensor>;
  using Loss = std::function<Tensor(const Inputs&)>;

  /// `loss` computes the loss of one batch, from one to three tensors or a vector of them. What it
  /// uses must stay. Makes the handle capturable (Amp::set_capturable, which says what it refuses).
  template <class F>
  CapturedStep(const Amp& precision, F loss, const CapturedStepOptions& options = {})
      : CapturedStep(precision, Loss(taking_inputs(std::move(loss))), options, 0) {}
  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  /// One step. Throws Unsupported where what `loss` does cannot be recorded (it waits for the
  /// device, uploads, draws random numbers by value, or runs inside of an autocast region that is
  /// open around the step); nothing has changed then.
  template <class... T>
  void operator()(const T&... inputs) {
    run(Inputs{inputs...});
  }
  void run(const Inputs& inputs);

  /// Of the last step, one element, unscaled; a copy, queued on the current stream.
  Tensor loss() const;
  bool captured() const;  // the next step of the first shape is a replay, if nothing changes

  struct Impl;

 private:
  CapturedStep(const Amp& precision, Loss loss, const CapturedStepOptions& options, int);
  template <class F>
  static Loss taking_inputs(F f) {
    if constexpr (std::is_invocable_v<F, const Inputs&>) {
      return f;
    } else if constexpr (std::is_invocable_v<F, const Tensor&>) {
      return [f](const Inputs& x) { return f(x.at(0)); };
    } else if constexpr (std::is_invocable_v<F, const Tensor&, const Tensor&>) {
      return [f](const Inputs& x) { return f(x.at(0), x.at(1)); };
    } else {
      return [f](const Inputs& x) { return f(x.at(0), x.at(1), x.at(2)); };
    }
  }

  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::amp
