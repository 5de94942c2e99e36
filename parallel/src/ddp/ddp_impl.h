// What DistributedDataParallel is made of: the model's gradients, in a Reducer that follows the arena.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cairn/autograd/engine.h"
#include "cairn/optim/arena.h"
#include "cairn/parallel/distributed.h"
#include "ddp/local_checks.h"

namespace cairn::parallel {

struct DistributedDataParallel::Impl final : core::GradientReducer,
                                             std::enable_shared_from_this<Impl> {
  Impl(nn::Module& model, ProcessGroup group, const DistributedOptions& options);
  ~Impl() override;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void settle() override;
  bool keeps_reduced() const override { return options.average || group.rank() == 0; }
  void refuse(const std::string& why) override;

  /// Hooks and the reducer of every parameter, frozen ones too: they may be unfrozen.
  void connect();
  /// Follows the model and the arena where the user, amp or an optimizer has changed them.
  void follow_model(bool in_backward);
  bool is_reduced(const Tensor& parameter) const;
  bool has_plan() const { return planned_generation == arena->generation(); }
  void plan();
  void plan_anew();
  /// Where half gradients are: the arena of a rank that adds to some turns to f32.
  static constexpr char kWide = 'w', kNarrow = 'n';
  char slots_letter() const { return arena->f32_slots() ? kWide : kNarrow; }
  void forward_begins(const Tensor& x);
  void sync_buffers(int root);

  // A backward.
  void on_ready(const Tensor& parameter);
  void begin();
  void meet();
  void agree_after_no_sync();
  std::string own_slots() const;
  void follow_slots(const std::vector<std::string>& ranks);
  void break_off(const std::string& error);
  bool asks_what_is_reached() const;
  void mark_what_is_not_reached();
  std::vector<bool> exchange_reached(const std::vector<bool>& reached);
  void check_static(const std::vector<bool>& reaches);
  void mark_unreached(std::size_t gradient);
  void mark_zero(std::size_t gradient);
  void mark_late();
  void check_what_is_left();
  void before_reduction(const std::vector<std::size_t>& places);
  void finish();
  bool reduces() const { return no_sync_depth == 0 && world_synchronizes; }
  bool finds_unused() const { return options.find_unused_parameters || options.static_graph; }

  // A step.
  bool has_sum() const;
  void wait_for_reductions();
  void share_what_is_local();

  // Uneven inputs.
  std::vector<std::string> announce(char what);
  void begin_joined();
  bool others_go_on();

  const NamedTensor& parameter_of(std::size_t gradient) const {
    return parameters[trained[gradient]];
  }
  core::GradientSlot& slot_of(std::size_t gradient) const {
    return parameter_of(gradient).tensor.gradient_slot();
  }
  [[noreturn]] void fail_everywhere(const std::string& message) const;

  nn::Module* model;
  ProcessGroup group;
  DistributedOptions options;
  Reducer reducer;
  NamedTensors parameters, buffers;  // the model's
  std::shared_ptr<optim::GradientArena> arena;
  std::uint64_t planned_generation = 0;
  std::vector<std::size_t> trained;                          // by gradient: its parameter
  std::unordered_map<const void*, std::size_t> gradient_of;  // by Tensor::id()
  std::vector<autograd::HookHandle> hooks;
  LocalChecks local_checks;
  int no_sync_depth = 0;
  bool world_synchronizes = true;  // World::synchronize

  std::string first_batch;     // its digest
  bool batches_known = false;  // to be other ones on every rank, or warned of

  core::RunId run = 0;       // the reducing backward under way; 0: none
  bool met = false;          // the others are in it too
  bool late = false;         // ranks' slots differ: it reduces when all of them are f32, at its end
  core::RunId seen_run = 0;  // the last one that a hook was called in
  core::RunId told_run = 0;  // the last one that the others have heard of
  core::GradientScale scale;  // of its loss
  bool agreed = false;        // nothing is left on any rank that a step has to reduce
  bool accumulated = false;   // some backwards, which reduced nothing, may be lost on some ranks
  bool apart = false;         // there have been such ones, or that one rank refused
  bool sums_left = false;     // a rank had sums at the beginning of the last backward that asked

  // What losses reach.
  std::vector<std::string> unused;
  std::vector<bool> reached_somewhere;  // on some rank, by parameter
  bool graph_known = false;  // static_graph: reached_somewhere is that of the first backward
  std::vector<bool> static_reached;  // by this rank's first loss; empty: it had none

  struct Uneven {
    DivideBy divide_by = DivideBy::participants;
    std::int64_t samples = 0;
    bool over = false;
    std::vector<std::string> announced;  // heard by others_go_on(), for the backward of zero()
  };
  std::unique_ptr<Uneven> uneven;  // while a Join lives
  bool shadows() const { return uneven && !uneven->announced.empty(); }
};

}  // namespace cairn::parallel
