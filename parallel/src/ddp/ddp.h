// DistributedDataParallel::Impl: a model's gradients in a Reducer that follows the arena.
//
// A backward that reduces: the first ready gradient begins it (model and plan are current, ranks
// tell what their losses reach where that may differ), each ready gradient is marked in the
// reducer, the end of the run waits for the last bucket. A backward that fails gives the group up:
// ranks that wait in its collectives throw, naming this rank. A step reduces what backwards under
// no_sync left.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cairn/autograd/engine.h"
#include "cairn/core/sharding.h"
#include "cairn/optim/arena.h"
#include "cairn/parallel/sharded.h"
#include "ddp/likely_mistakes.h"
#include "ddp/uneven_inputs.h"
#include "ddp/unused_parameters.h"
#include "sharding/weight_units.h"

namespace cairn::parallel {

/// Whether backwards reduce.
class NoSyncState {
 public:
  bool reduces() const { return depth_ == 0 && world_synchronizes_; }
  /// A guard begins; it takes one off what it is given when it ends.
  int* enter() {
    was_used_ = true;
    ++depth_;
    return &depth_;
  }
  void synchronize(bool on) {  // World::synchronize
    world_synchronizes_ = on;
    was_used_ = was_used_ || !on;
  }
  /// Since a step last reduced what ranks had.
  bool was_used() const { return was_used_; }
  /// All ranks are in such a step: where all refuse it, all come to the next.
  void compare() { was_used_ = true; }
  void reduced() { was_used_ = false; }

 private:
  int depth_ = 0;
  bool world_synchronizes_ = true;
  bool was_used_ = false;
};

struct DistributedDataParallel::Impl final : core::GradientReducer,
                                             core::RankSet,
                                             std::enable_shared_from_this<Impl> {
  Impl(nn::Module& model, ProcessGroup group, const ShardedOptions& options,
       std::optional<ZeroStage> stage);
  ~Impl() override;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void reduce_pending() override;
  void backward_failed(const std::string& why) override;
  std::vector<int> job_ranks() const override { return group.world().job_ranks(); }
  OwnPart own_part() const override;
  std::vector<std::string> exchange(const std::string& own, std::string_view name) override {
    return shards.exchange(own, name);
  }
  void gather_weights(const std::vector<Tensor>& weights) override;
  void weight_arrived(const Tensor& weight) override;
  void update_failed(const std::string& why) override;

  /// Hooks and the reducer of every parameter, frozen ones too: they may be unfrozen.
  void connect();
  std::shared_ptr<optim::GradientArena> attach_arena() const;
  /// Follows a model whose parameters or buffers have changed, on all ranks alike.
  void follow_model(bool in_backward);
  void plan();
  void forward_begins(const Tensor& x);
  void sync_buffers(int root);

  // A backward.
  void on_ready(const Tensor& parameter);
  void begin_reducing_backward();
  ReachedParameters reached_parameters() const;
  void agree_on_unused(const ReachedParameters& own, const std::string& losses);
  void mark_unused_parameters(const ReachedParameters& own);
  void mark_zero(std::size_t gradient);
  void mark_ready(std::size_t gradient);
  void keep_part(std::size_t gradient, const Tensor& part);
  void end_reducing_backward();

  // A step.
  void wait_for_reductions();
  bool reduce_unreduced();

  bool other_ranks_have_batches();

  bool is_reduced(const Tensor& parameter) const;
  void check_communicators(const NamedTensors& of) const;
  bool shards_gradients() const { return stage >= ZeroStage::gradients && shards.world_size() > 1; }
  bool finds_unused() const { return options.find_unused_parameters || options.static_graph; }
  const NamedTensor& parameter_of(std::size_t gradient) const {
    return parameters[parameter_of_gradient[gradient]];
  }
  core::GradientSlot& slot_of(std::size_t gradient) const {
    return parameter_of(gradient).tensor.gradient_slot();
  }
  [[noreturn]] void fail_everywhere(const std::string& message) const;

  nn::Module* model;
  ProcessGroup group;
  DistributedOptions options;
  std::optional<ZeroStage> stage;  // of a ShardedDataParallel
  ProcessGroup shards;             // the ranks that divide a copy; all but for hybrid sharding
  ProcessGroup near;               // those of them who keep a copy from a forward to its backward
  /// The arena's, where ranks divide gradients: it has no buffers while this lives.
  std::shared_ptr<const void> without_buffers = std::make_shared<char>();
  std::shared_ptr<WeightUnits> units;  // null: weights are whole (all but stage 3)
  Reducer reducer;
  core::World reducer_world;         // also tells of gradients that were not finite before
  NamedTensors parameters, buffers;  // the model's
  std::shared_ptr<optim::GradientArena> arena;
  std::uint64_t planned_generation = 0;  // of the arena
  std::vector<std::size_t> parameter_of_gradient;
  std::unordered_map<const void*, std::size_t> gradient_of;  // by Tensor::id()
  std::vector<autograd::HookHandle> hooks;
  FirstBatch first_batch;
  UnusedParameters unused;
  std::unique_ptr<UnevenInputs> uneven_inputs;  // while a Join lives
  core::RunId reducing_backward = 0;            // its run; 0: none is under way
  NoSyncState no_sync;
};

}  // namespace cairn::parallel
