#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cairn/autograd/engine.h"
#include "cairn/libtorch/model.h"
#include "cairn/optim/arena.h"
#include "mirror.h"
#include "shared_writes.h"

namespace cairn::libtorch {

struct Model::Impl final : optim::SharedParameters {
  /// One tensor, as both see it.
  struct Shared {
    std::string name;
    torch::Tensor theirs;
    Tensor ours;
    std::uint32_t version = 0;    // of theirs, when ours last knew what was written
    std::uint64_t written = 0;    // of ours' storage, when theirs last knew
    bool shows_gradient = false;  // theirs' .grad is the slot's
  };

  using Wrap =
      std::function<std::unique_ptr<parallel::DistributedDataParallel>(nn::Module& mirror)>;

  /// wrap: makes it data parallel; may be empty.
  Impl(torch::nn::Module& theirs, const Wrap& wrap);
  ~Impl() override;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Cairn may have given a tensor other memory: libtorch's points there from now on.
  void follow_cairn();
  /// What libtorch's side changed since: what was written, frozen, unfrozen, or lost its gradient.
  /// Throws where memory has moved.
  void follow_changes();
  /// The same ahead of a backward or a step. Throws as SharedWrites::check() too.
  void pull_foreign_changes() override;
  /// note_written() and place_gradients(), after a step.
  void push_changes() override;
  /// Cairn may have written parameters in place: libtorch hears of those that it has.
  void note_written();
  /// Each .grad is its slot's view where that holds a gradient, whole or broken, or the f32 sum of
  /// an unscaled one; a tensor without elements where ranks divide it; else undefined.
  void place_gradients();
  std::vector<SharedWrites::Parameter> parameters_waiting() const;
  /// A parameter's .grad is complete: it moves into its slot, and whoever waits for it is told.
  void on_gradient(std::size_t parameter);

  torch::nn::Module& module;
  KnownTensors known;  // while it is built
  Mirror mirror;
  std::vector<Shared> parameters, buffers;
  std::unordered_map<const at::TensorImpl*, std::size_t> index;  // of parameters
  std::shared_ptr<optim::GradientArena> arena;
  std::unique_ptr<parallel::DistributedDataParallel> ddp;
  SharedWrites writes;
  bool sees_gradients = false;                 // those of the backward that runs
  std::vector<autograd::HookHandle> watching;  // that there are no others
  std::optional<amp::Options> precision;       // resolved; unset: not initialized
};

}  // namespace cairn::libtorch
