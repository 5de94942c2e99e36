// GradientSlot: a parameter's gradient: where it lies, what it holds, and who may touch it when.
//
//   empty    nothing has been written since the last step (memory is never zeroed).
//   writing  a backward (a run) has begun that may write it, and has not ended.
//   local    it holds this rank's gradient, of one run or the sum of several.
//   reduced  it holds the average (or the sum) over the ranks of its reducer.
//   broken   a run threw after it had added to a gradient that was there, or its reduction failed:
//            what it holds is neither the old gradient nor the new one. Only clear() is allowed.
//
// A run ends or throws as a whole. When it throws, a slot that was empty before is empty again, one
// that it has not written is as before, and one that it has added to is broken: a step refuses it
// and says why. Of ranks that reduce together, one that throws has lost what the others may have:
// all slots that its loss reached are broken there, and the others hear of it where they meet.
//
// Where ranks divide gradients (ZeRO, stage 2), what is local is whole, and what is reduced is this
// rank's part of the gradient alone, [n]: so is the sum that it goes to before another backward
// writes.
//
// Beside its memory a slot may hold a sum: f32, unscaled, into which gradients of other
// contributions were moved (gradients::stash). A sum with a local part is local as well. A broken
// slot is broken until clear(), whoever steps it.
//
// Autograd begins, writes and ends slots; the arena places them in its buffers; a data-parallel
// reducer moves them from local to reduced; optimizers read, stash and clear them. A slot is used
// by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::core {

class Tensor;
class GradientSlot;

/// One outermost backward of this process, from 1; 0: none.
using RunId = std::uint64_t;

/// The backwards of one loss at one scale, as whoever scales losses knows them
/// (gradients::CheckedContribution). The slots that hold its gradients share it: it ends when the
/// last of these is stepped or dropped.
class Contribution {
 public:
  virtual ~Contribution() = default;
  /// "loss 0 scaled by 1024": the same on every rank, and another one for each loss and scale.
  virtual std::string describe() const = 0;
  bool over = false;  // a step has judged it, and found it finite: nobody asks for it any more
};

/// Who multiplied a loss before its backward, and by what: its gradients stay multiplied until a
/// step.
struct GradientScale {
  std::uint64_t scaler = 0;  // next_scaler_id(); 0: nobody, the gradient is what it says
  double factor = 1.0;
  std::shared_ptr<Contribution> contribution = nullptr;  // null: of a plain backward
};
std::uint64_t next_scaler_id();  // another one at each call, from 1

/// The buffers that slots are slices of (gradients::GradientArena).
class GradientMemory {
 public:
  virtual ~GradientMemory() = default;
};

/// Brings what slots hold from this rank to all ranks (parallel::DistributedDataParallel).
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  /// Reduces what is some rank's alone, in its slots and their sums: a collective, unless all ranks
  /// know that there is nothing. Returns when all that it has reduced so far is whole, and waits
  /// for the devices if it must. Throws CommunicationError otherwise; the slots are broken then.
  virtual void reduce_pending() {}
  /// A run has thrown on this rank, or could not begin.
  virtual void backward_failed(const std::string& /*why*/) {}

  /// Which even_part() of every weight this rank updates.
  struct OwnPart {
    int rank = 0;
    int world_size = 1;      // 1: this rank updates all of them
    bool gradients = false;  // what is reduced is this rank's part, too
  };
  virtual OwnPart own_part() const { return {}; }
  /// What each of those ranks says, by rank. A collective.
  virtual std::vector<std::string> exchange(const std::string& own, std::string_view /*name*/) {
    return {own};
  }
  /// This rank has updated its even_part() of these weights: every rank gets all of them. A
  /// collective.
  virtual void gather_weights(const std::vector<Tensor>& /*weights*/) {}
  /// A weight whose values were deferred has got its dtype (amp::initialize): what other ranks keep
  /// of it need not stay.
  virtual void weight_arrived(const Tensor& /*weight*/) {}
  /// This rank could not update its part.
  virtual void update_failed(const std::string& /*why*/) {}
};

class GradientSlot {
 public:
  enum class State : std::uint8_t { empty, writing, local, reduced, broken };

  GradientSlot();
  ~GradientSlot();
  GradientSlot(const GradientSlot&) = delete;
  GradientSlot& operator=(const GradientSlot&) = delete;

  State state() const { return state_; }
  /// It holds a gradient that may be read: local, reduced, or written by the run that has begun.
  bool holds_gradient() const;
  /// What memory() holds; undefined unless holds_gradient(). Scaled, and without the sum.
  Tensor gradient() const;
  /// What it holds, memory() or the sum, is this rank's part.
  bool holds_part() const { return holds_gradient() ? memory_is_part_ : summed_ && sum_is_part_; }
  /// The whole gradient, memory() or the sum; undefined where there is none. Throws InvalidArgument
  /// where a part of it lies in the other or on other ranks, naming the parameter.
  Tensor whole_gradient(const std::string& name) const;
  /// Where it lies or will lie; undefined for an empty slot that is not placed.
  const Tensor& memory() const;
  /// Of what it holds, or of the sum.
  const GradientScale& scale() const { return scale_; }

  // ---- Memory

  /// The buffers that the slot belongs to, whether or not it lies in one now.
  void set_owner(std::weak_ptr<GradientMemory> owner) { owner_ = std::move(owner); }
  std::shared_ptr<GradientMemory> owner() const { return owner_.lock(); }
  /// From now on the slot is this memory, shaped like its parameter: an owner's, or a foreign
  /// trainer's. The caller has copied what it held.
  void place(Tensor memory);
  /// Leaves its place: a gradient that it holds becomes a tensor of its own, in the same memory.
  void displace();
  bool placed() const { return placed_; }

  // ---- Autograd

  /// It holds a gradient that must be moved into the sum before a run at this scale writes here.
  bool must_stash_for(const GradientScale& scale) const;
  /// It holds a plain backward's gradient, which counts as a part of the contribution that comes
  /// next.
  bool belongs_to_next(const GradientScale& scale) const;
  /// A run that may write the slot has begun. Once a run; the same run again does nothing. Throws
  /// Error for a broken slot, InvalidArgument where it holds a gradient of another scaler, or one
  /// that must_stash_for(scale); `name` is the parameter's.
  void begin(RunId run, const GradientScale& scale, const std::string& name);
  /// The run writes memory() now. Returns true where it has to add to what is there.
  bool write();
  /// Memory for the first gradient of a slot that is not placed: gone with what it holds.
  void lend(Tensor memory);
  /// The first gradient of a slot that is not placed.
  void adopt(Tensor gradient);
  /// The same from outside of a run: a local gradient, in place of whatever was there.
  void set_own(Tensor gradient);
  void end();                            // the run has ended
  void abort(const std::string& error);  // the run has thrown

  // ---- Ranks

  void set_reducer(std::weak_ptr<GradientReducer> reducer) { reducer_ = std::move(reducer); }
  /// Set while the parameter belongs to a group of ranks that reduces its gradients.
  std::shared_ptr<GradientReducer> reducer() const { return reducer_.lock(); }
  /// The run that is writing adds to what is reduced: to the slot's, or to the sum's.
  bool adds_to_reduced() const;
  void mark_reduced();  // what memory() holds, or will hold when its run ends
  void mark_sum_reduced();
  /// The thread's as it was marked last (core::WorkFlowGuard).
  std::uint64_t flow() const { return flow_; }
  /// Of what it holds, of this run or of those before, this rank keeps the average of its part
  /// alone, which is or will be in `part`.
  void keep_part(Tensor part);
  /// The same of the sum.
  void keep_part_of_sum(Tensor part);
  /// The reduction of what it holds, if anything, has failed.
  void mark_broken(const std::string& error);

  // ---- Optimizers

  /// A foreign trainer has written memory().
  void mark_written(const GradientScale& scale = {});
  /// The sum's memory, whether or not it holds something; undefined before set_sum().
  const Tensor& sum() const;
  /// f32, shaped like the parameter, or like the part that memory() holds; the caller has copied
  /// what the former one held.
  void set_sum(Tensor memory);
  void release_sum();
  bool has_sum() const { return summed_; }
  bool sum_is_local() const { return summed_ && sum_is_local_; }
  /// Those that are in the sum.
  const std::vector<std::shared_ptr<Contribution>>& sum_contributions() const {
    return sum_contributions_;
  }
  /// What it holds is scaled, as only the one who did so knows.
  void set_scale(const GradientScale& scale) { scale_ = scale; }
  /// memory() was moved into the sum: the slot is empty.
  void mark_stashed();
  /// sum() was written: this rank's own and whole, of these contributions.
  void mark_summed(std::vector<std::shared_ptr<Contribution>> contributions) {
    summed_ = sum_is_local_ = true;
    sum_is_part_ = false;
    sum_contributions_ = std::move(contributions);
  }
  /// No gradient, no sum: whatever was there or is broken is gone. Inside a run: what it writes
  /// next is the first.
  void clear();
  std::uint64_t clears() const { return clears_; }  // so far
  /// Throws Error where the slot is broken, naming the parameter and what threw.
  void check_whole(const std::string& name) const;
  /// Makes `optimizer` the one that steps this parameter; false where another, living one does.
  bool claim(const std::shared_ptr<const void>& optimizer);

 private:
  void check_may_begin(const GradientScale& scale, const std::string& name) const;
  void forget_scale_if_empty();
  void drop_memory();
  bool held_before() const { return before_ == State::local || before_ == State::reduced; }

  State state_ = State::empty;
  State before_ = State::empty;  // the run that is writing
  RunId run_ = 0;                // that run, or the last one
  std::uint64_t clears_ = 0;
  std::uint64_t flow_ = 0;
  bool written_ = false;  // by the run that is writing
  bool reduced_in_run_ = false;
  bool placed_ = false;
  bool memory_is_part_ = false;
  bool summed_ = false;
  bool sum_is_local_ = false;
  bool sum_is_part_ = false;
  GradientScale scale_;
  std::vector<std::shared_ptr<Contribution>> sum_contributions_;
  std::string error_;  // broken: why
  std::unique_ptr<Tensor> memory_, sum_;
  std::weak_ptr<GradientMemory> owner_;
  std::weak_ptr<GradientReducer> reducer_;
  std::weak_ptr<const void> optimizer_;
};

}  // namespace cairn::core
