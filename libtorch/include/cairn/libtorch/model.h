// A torch::nn::Module as Cairn trains it.
//
//   Net net;
//   libtorch::Model model(*net, group);              // with several ranks: data parallel
//   optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
//   auto precision = libtorch::initialize(model, optimizer, {.world = model.world()});
//   auto y = model.run([&](auto x) { return net->forward(x); }, batch.data);
//   precision.backward(torch::nll_loss(y, batch.target));
//   if (auto r = precision.step(); !r.applied) log::warn("{}", r.reason);
//
// Parameters and buffers stay libtorch's tensors. Cairn sees the same memory under the same names;
// where amp gives a parameter another dtype, its data changes in place, and the optimizers' f32
// masters are Cairn's. Gradients lie in Cairn's arena: in a backward of Cairn's
// (precision.backward(), model.backward()) each .grad becomes a view of its slot, the moment that
// it is complete; with ranks, its bucket then goes on its way while libtorch's backward goes on. A
// plain loss.backward() throws: Cairn could not tell what it wrote. So does autograd::backward() of
// a join's zero(): zero_grad() after it could not be followed.
//
// The module's parameters, buffers and submodules are those of the Model's construction, on one
// device; whoever moves them (net->to(), set_data()) gets an error that names one. What others
// write to the parameters in place (clamps, averages) is followed. Freezing and unfreezing too.
//
// One thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "cairn/amp/options.h"
#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"
#include "cairn/libtorch/autocast.h"
#include "cairn/libtorch/nested.h"
#include "cairn/nn/module.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/sharded.h"

namespace cairn::libtorch {

class Model : public core::Stateful {
 public:
  /// The module must outlive it. Throws InvalidArgument for a parameter of another Model, and for
  /// what Cairn has no tensor for.
  explicit Model(torch::nn::Module& module);
  /// The same, with gradients averaged over the group's ranks as parallel::DistributedDataParallel
  /// does; every rank starts with rank 0's values. Batch norms: SyncBatchNorm.
  Model(torch::nn::Module& module, const parallel::ProcessGroup& group,
        const parallel::DistributedOptions& options = {});
  /// The same, with optimizer states and f32 masters divided among the ranks (ZeRO, stage 1), or
  /// gradients too (stage 2): a .grad that has been reduced is a tensor of the meta device then,
  /// which says that there is one and has no elements. Throws Unsupported for stage 3: nothing
  /// would gather a weight where the module uses it.
  Model(torch::nn::Module& module, const parallel::ProcessGroup& group,
        const parallel::ShardedOptions& options);
  ~Model() override;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  /// For optimizers: by libtorch's names ("conv1.weight"), a tied one once.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  /// For amp, Accumulation, samplers and training states.
  core::World world() const;

  /// forward(inputs...) as the opt level says: in an autocast region at O1; at O2 and O3 floating
  /// tensors in the inputs, in any nesting (nested.h), arrive in half, and those in the result
  /// leave in f32. What is no tensor is handed on. `forward`: a function, or a module (net, an
  /// nn::Sequential).
  template <class F, class... Inputs>
  auto run(F&& forward, Inputs&&... inputs) {
    torch::Tensor first;
    (find_first(first, inputs), ...);
    const std::unique_ptr<AutocastGuard> running = begin_forward(first);
    using Result = decltype(call(forward, cast(std::forward<Inputs>(inputs))...));
    if constexpr (std::is_void_v<Result>) {
      call(forward, cast(std::forward<Inputs>(inputs))...);
    } else {
      return map_tensors(std::decay_t<Result>(call(forward, cast(std::forward<Inputs>(inputs))...)),
                         [this](const torch::Tensor& x) { return cast_output(x); });
    }
  }
  /// At O1 an autocast region, else nothing: for what runs outside of run(), a loss say.
  [[nodiscard]] std::unique_ptr<AutocastGuard> region() const;

  /// A backward without amp. The optimizer's step is its own: optimizer.step(); gradients are gone
  /// afterwards: .grad is undefined.
  void backward(const torch::Tensor& loss, bool retain_graph = false);
  /// loss: of Cairn's, as join.zero() of DistributedDataParallel.
  void backward(const Tensor& loss);

  /// While it lives, a backward adds up gradients on this rank and reduces nothing. With one rank:
  /// nothing.
  [[nodiscard]] std::optional<parallel::DistributedDataParallel::NoSync> no_sync(
      bool enabled = true);
  /// join(), buckets(), unused_parameters() ..., and a part of training states; null without a
  /// group. Synchronises requires_grad first. Do not call operator() on the result.
  parallel::DistributedDataParallel* ddp();

  /// Parameters in full precision, and buffers, by libtorch's names: Python's load_state_dict takes
  /// them.
  StateDict state_dict() const override;
  /// Throws DataError, before anything changes, as nn::Module's does.
  void load_state_dict(const StateDict& state) override;

  /// The module as Cairn sees it, for what takes one (checkpointing::load). It does not compute:
  /// its forward hands its input on.
  nn::Module& module();

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  template <class F, class... X>
  static decltype(auto) call(F& f, X&&... x) {
    if constexpr (requires { f->forward(std::forward<X>(x)...); }) {
      return f->forward(std::forward<X>(x)...);
    } else {
      return std::invoke(f, std::forward<X>(x)...);
    }
  }
  template <class T>
  static void find_first(torch::Tensor& first, T& value) {
    for_each_tensor(value, [&](const torch::Tensor& x) {
      if (!first.defined()) first = x;
    });
  }
  template <class T>
  decltype(auto) cast(T&& value) const {
    if constexpr (detail::kNests<std::remove_cvref_t<T>>) {
      return map_tensors(std::remove_cvref_t<T>(value),
                         [this](const torch::Tensor& x) { return cast_input(x); });
    } else {
      return std::forward<T>(value);
    }
  }
  std::unique_ptr<AutocastGuard> begin_forward(const torch::Tensor& first);
  torch::Tensor cast_input(const torch::Tensor& x) const;
  torch::Tensor cast_output(const torch::Tensor& x) const;

  std::shared_ptr<Impl> impl_;  // the arena knows it
};

}  // namespace cairn::libtorch
