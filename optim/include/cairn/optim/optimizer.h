// Optimizers that update in two passes over all parameters: check + norm, then unscale + clip +
// update + half write. The host waits once a step, for what the check found. This is what all of
// them share; each rule has a header of its own (adam.h, sgd.h, ...; optim.h has all).
//
//   optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-3});
//   optim::StepResult r = optimizer.step({.max_gradient_norm = 1.0});
//   if (!r.applied) log::warn("{}", r.reason);  // "inf in the gradient of fc.weight (3 elements)"
//
// Parameters are f32 (updated in place) or half. A half parameter gets a master
// (kernels::MasterWeight, made from its f32 value by amp::initialize, or from its half value at the
// first step) and is rounded from it after each update; without master weights the half value
// itself is updated. Moments are f32, laid out like the parameter; set_state_options() keeps both
// in less memory. Parameters without a gradient are left alone, and so are those that do not
// require one. step() never zeroes gradients: it ends by clearing them (they count as unwritten),
// unless asked to keep them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/tensor.h"
#include "cairn/core/work_observer.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/optim/arena.h"
#include "cairn/optim/collapse.h"
#include "cairn/optim/partition.h"
#include "cairn/optim/report.h"

namespace cairn::optim {

using kernels::MasterStorage;

/// What a step did. Whoever does not look at it trains on without knowing of skipped steps.
struct [[nodiscard]] StepResult {
  bool applied = true;
  std::string reason;   // empty, or "inf in the gradient of conv1.weight (3 elements); loss scale
                        // 65536 -> 32768"
  std::string culprit;  // the parameter with the first non-finite gradient
  /// Of the unscaled gradients of all groups, before clipping; NaN: skipped, unchecked.
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();
  double clip_coefficient = 1.0;  // the smallest of the groups
  /// false: the step was capturable, and what it did is known to the device alone; the fields above
  /// say applied.
  bool known = true;
};

/// StepResult::reason of a step that found no gradient.
inline constexpr const char* kNoGradient = "no parameter has a gradient (was there a backward?)";

struct StepOptions {
  double gradient_scale = 1.0;      // multiplies gradients: 1 / loss scale, 1 / accumulation steps
  bool check = true;                // skip the update where a gradient is not finite
  double max_gradient_norm = 0;     // 0: no clipping; else the coefficient is max / (norm + 1e-6)
                                    // where the norm is larger (as torch's)
  double norm_type = 2;             // p of that norm: >= 1, infinity for the largest magnitude
  bool per_group_norm = false;      // clips each group by its own norm instead of that of all
  bool error_if_nonfinite = false;  // a gradient that is not finite is an Error instead of a skip
  bool keep_gradients = false;
  /// Steps skipped in a row that end in GradientCollapse; 0: never. amp::ScaledStep, which skips
  /// while it looks for its scale, counts those at the least scale; amp::Amp has
  /// amp::Options::collapse_after.
  int collapse_after = 50;
};

/// How an optimizer keeps its state in memory. Files hold f32 values either way.
struct StateOptions {
  DType moments = DType::f32;                  // or bf16: rounded after each update
  MasterStorage masters = MasterStorage::f32;  // or remainder: half parameters must be bf16
  /// Masters and moments lie in nameless files of this folder (core/file_memory.h), of which a step
  /// brings in a block of tensors after another; empty: in memory.
  std::string folder = {};
  /// Those of parameters on a GPU lie in pinned memory of the host, whose kernels update them, a
  /// block after another: gradients come to it, weights go back. In files, they do so too. On the
  /// CPU they are there already. Not with remainders.
  bool on_host = false;

  kernels::StatePlace place() const { return {folder, on_host}; }
};

struct ParameterGroup {
  NamedTensors parameters;
  double lr = 1e-3;
  double weight_decay = 0.0;
  // Instead of the optimizer's own, where it has such an option.
  std::optional<double> beta1 = {}, beta2 = {}, eps = {}, momentum = {};
};

struct LarcOptions;

class Optimizer : public core::Stateful {
 public:
  ~Optimizer() override;
  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  /// A check, then update() or skip(). Where neither check nor clipping is asked for, one pass. Not
  /// applied where no parameter has a gradient. Throws, and changes nothing: InvalidArgument for
  /// gradients that amp scaled (amp::Amp::step() is theirs), for a parameter that another optimizer
  /// steps too and where this optimizer was moved from; Error for a gradient that a backward left
  /// half-added when it threw. Gradients that are this rank's alone although
  /// DistributedDataParallel reduces the model's (no_sync) are averaged first. A skip is logged as
  /// a warning, of several in a row the first, second, fourth, eighth ...;
  /// StepOptions::collapse_after of them throw GradientCollapse.
  ///
  /// Where the update itself fails (a disk with states in files, a device), some weights may have
  /// had it: from then on steps and state_dict() throw InvalidArgument, until load_state_dict().
  StepResult step(const StepOptions& options = {});

  // The parts of a step, for trainers that decide between them (on several optimizers together,
  // say). begin_check() and update() wait for what ranks reduce.
  /// Launches pass 1; the host waits where the report is read. norm_type >= 1, or infinity.
  [[nodiscard]] PendingReport begin_check(double norm_type = 2.0) const;
  /// Pass 2. Clipping needs a report with norms of options.norm_type; LAMB, NovoGrad and LARC need
  /// one whatever the options say.
  StepResult update(const GradientReport& report, const StepOptions& options);
  /// Only clears the gradients. Throws Error with error_if_nonfinite, and clears nothing then.
  StepResult skip(const GradientReport& report, const StepOptions& options);
  void clear_grad();  // the stash too

  /// From now on a step takes no host: rates, step counts, and what decides whether it is applied,
  /// lie on the device, so that a captured graph (core::Graph) can repeat it. Its bits are those of
  /// other steps; its result is not known. steps() and states wait for the device. All parameters
  /// on one device. Throws Unsupported for FusedNovoGrad and LARC, whose norms the host reads. A
  /// capturable step throws Unsupported for clipping by group or by another norm than the 2-norm,
  /// for error_if_nonfinite, and for states that are divided among ranks or lie elsewhere.
  void set_capturable(bool value);
  bool capturable() const { return device_ != nullptr; }

  /// Moves the gradients that are written, without the scale that their slots know of and times
  /// `scale`, into f32 sums beside them (adds to what is there) and leaves the slots unwritten: how
  /// backwards with different loss scales accumulate. One pass, which checks what it moves. A later
  /// begin_check() and update() use the sums, after adding what came into the slots since. The
  /// sums' memory stays until the optimizer ends.
  PendingReport stash(double scale = 1.0);

  /// Rates and the other options may be written; parameters come by add_group.
  std::vector<ParameterGroup>& groups() { return groups_; }
  const std::vector<ParameterGroup>& groups() const { return groups_; }
  /// Throws InvalidArgument, naming it, for a parameter that is there already, has no name, no
  /// dense layout or a dtype other than f16, bf16, f32.
  void add_group(ParameterGroup group);
  double lr() const;                    // of the first group
  void set_lr(double lr);               // of every group
  std::int64_t steps() const;           // applied ones
  void set_master_weights(bool value);  // false drops the masters
  /// Converts and moves what is there; masters that are converted at the next step. Throws
  /// InvalidArgument for moments that are neither f32 nor bf16 and, naming it, for remainders of an
  /// f16 parameter; Unsupported for remainders of a GPU's parameters that the host updates, and
  /// where the optimizer is capturable for any other place than beside the parameters; IoError for
  /// a folder that is not there, cannot be written to or has too little room.
  void set_state_options(const StateOptions& options);
  const StateOptions& state_options() const { return state_options_; }

  /// kind, steps; options: what the rule was constructed with; groups: lr, weight_decay, and the
  /// betas, eps and momentum that hold for them; state, nested by parameter name: step and the
  /// moments in f32 (sharing memory with this optimizer where they are kept so; Shards where ranks
  /// divide them: parallel::ShardedDataParallel). Masters are saved with the model.
  StateDict state_dict() const override;
  /// Takes lr, weight_decay, betas, eps and momentum over from the state, with a warning that names
  /// both values where they differ from this optimizer's (not of an lr that a Schedule sets). Ends
  /// what is pending: gradients are dropped. Throws DataError, and changes nothing, naming
  /// everything that is missing, surplus, mis-shaped or of another rule.
  void load_state_dict(const StateDict& state) override;
  /// That of an update which stopped, too: it has stopped where it is loaded.
  StateDict undo_state() const override;

  /// As torch.optim's class of that name has it (Adam, AdamW, SGD, Adagrad, RMSprop): state, by
  /// index in registration order: step, exp_avg ...; param_groups: lr ..., params. Lists and tuples
  /// are dictionaries with the keys "0", "1" ..., booleans 0 and 1. docs/optim.md has the table.
  /// Throws Unsupported for a rule or an option that torch lacks.
  StateDict torch_state_dict() const;
  /// Takes such a state over: lr, weight decay, betas, eps and momentum of each group, step counts
  /// and moments. Numbers may be tensors of one element. Parameters may be names instead of indices
  /// (torch.distributed.checkpoint.state_dict), in any order; where none is known here (another
  /// model's names) they are taken as they come. Throws DataError, and changes nothing, where it
  /// differs from this optimizer in anything else.
  void load_torch_state_dict(const StateDict& state);

 protected:
  explicit Optimizer(std::vector<ParameterGroup> groups);
  struct Call {
    double gradient_scale = 1.0;
    std::int64_t step = 1;       // each entry is at its step-th update, from 1
    kernels::DeviceStep device;  // where it is defined, it says so instead
    double weight_decay = 0.0;   // the group's, where LARC has not put it into the gradients
  };
  using Entries = std::vector<kernels::UpdateEntry>;
  /// Updates parameters of one group, on one device.
  virtual void update_group(const ParameterGroup& group, const Entries& entries,
                            const Call& call) = 0;
  virtual const char* kind() const = 0;                       // "FusedAdam"
  virtual std::vector<std::string> moment_names() const = 0;  // at most two; names in the state
  virtual double initial_moment() const { return 0.0; }
  struct RuleOption {
    std::string name;
    std::variant<double, bool> value;
    const char* torch = nullptr;  // its name in torch's class, "betas.0"; null: it has none there
    double number() const {
      return std::visit([](double x) { return x; }, value);
    }
  };
  /// Everything that the rule was constructed with but lr and weight_decay: what a state is
  /// compared with when it is loaded.
  virtual std::vector<RuleOption> rule_options() const = 0;

  /// Flags of torch's class that are false here; none: torch has no such optimizer.
  virtual std::vector<const char*> torch_flags() const { return {}; }
  /// What torch's rule has and this one has not, with or without weight decay; null: nothing.
  virtual const char* missing_for_torch(bool /*decays*/) const { return nullptr; }
  virtual bool torch_counts_steps() const { return true; }
  virtual bool torch_begins_with_state() const { return false; }

  // Of rules that look at norms: each step then needs a checked report.
  /// Each gradient's norm of this type goes into running_norm().
  virtual std::optional<double> running_norm_type() const { return std::nullopt; }
  /// UpdateEntry::norm for this update, kept in the state ("norm"), from that of the update before
  /// (0 in the first) and the norm of the gradient (unscaled, clipped).
  virtual double running_norm(const ParameterGroup& /*group*/, double /*before*/,
                              double /*gradient_norm*/, std::int64_t /*step*/) const {
    return 0.0;
  }
  /// All gradients (unscaled, clipped as StepOptions says) are scaled to this 2-norm where theirs
  /// is larger; 0: no.
  virtual double own_max_norm() const { return 0.0; }
  /// The update is two passes, and the second needs norms of whole tensors, which where ranks have
  /// parts of them they tell each other between begin_update() and end_update().
  virtual bool updates_in_two_passes() const { return false; }
  /// Of entry i two checks, 2 i and 2 i + 1, whose pieces make up those of the whole tensor.
  virtual kernels::PendingCheck begin_update(const ParameterGroup& /*group*/,
                                             const Entries& /*pieces*/, const Call& /*call*/) {
    return {};
  }
  /// Both checks of each entry's whole tensor.
  using TwoChecks = std::array<kernels::TensorCheck, 2>;
  virtual void end_update(const ParameterGroup& /*group*/, const Entries& /*entries*/,
                          const std::vector<TwoChecks>& /*found*/, const Call& /*call*/) {}

 private:
  friend class LARC;
  friend class OptimizerAccess;
  friend class PendingReport;
  friend class Schedule;
  friend class SharedStep;
  /// One of all groups, in registration order, and the state that is kept of it.
  struct Parameter : NamedTensor {
    std::size_t group = 0;
    OwnedRange part;  // what this rank keeps
    std::int64_t steps = 0;
    std::array<Tensor, 2> moments;  // undefined before the first step
    double norm = 0.0;              // of running_norm()
    double next_norm = 0.0;         // of the running update
    /// i32 [1], instead of `steps` where the optimizer is capturable. Parameters that had gradients
    /// in the same steps share one.
    Tensor count;
  };
  /// Entries that one kernel call updates: one device, one step count.
  struct Batch {
    std::size_t group = 0;
    std::int64_t step = 0;
    Tensor count;
    Entries entries;
    std::vector<std::size_t> parameters;       // of the entries
    std::vector<core::ElementRange> elements;  // of its parameter that an entry is of
  };
  /// The numbers of a capturable optimizer's steps.
  struct DeviceState {
    Device device;
    Tensor found_inf, clip, applied;  // f32, f64, i32 [1]
    Tensor overflowed;                // f32 [parameters]; not 0: it did since somebody asked
    std::vector<Tensor> rates;        // f64 [1], by group
    std::vector<double> written;      // what the host has put there
  };
  struct Loaded;

  void check_not_moved() const;
  void take_group(ParameterGroup group);
  void attach_arenas();
  /// After parameters changed dtype or device: the arenas are laid out anew, masters and moments
  /// move along. A step ends with it where it is needed, and amp::initialize, so that the first
  /// step does not.
  void refresh();
  void refresh_if_stale();
  Partition partition() const { return Partition(groups_); }
  /// Moments and masters follow the parameters' devices, the options and the ranks that they are
  /// divided among: lets go of what others keep.
  void follow();
  /// The same where files lay in this folder until now.
  void follow_from(const std::string& former_folder);
  /// Throws where states cannot lie as these options say.
  void check_place(const StateOptions& options) const;
  /// Whether states lie elsewhere than beside their parameters: steps walk through blocks then.
  bool lie_elsewhere(const StateOptions& options) const;
  /// The gradient that a step would use: the stashed sum, or what the slot holds; null: none.
  static const Tensor* gradient_of(const Parameter& parameter);
  bool has_gradient() const;

  // A step, in this order; each comes once.
  /// What ranks have reduced is whole, and they agree on what a step reduces: a collective where
  /// they do not know, the only one before the update. Throws InvalidArgument where this optimizer
  /// was moved from.
  void wait_for_reductions() const;
  /// Throws InvalidArgument, naming the first, for gradients that another one than `scaler` scaled.
  void check_scaler(std::uint64_t scaler) const;
  /// Throws for a gradient that is not whole or not this optimizer's; adds to sums what came since.
  void prepare_gradients() const;
  bool needs_report(const StepOptions& options) const;
  PendingReport begin_own_check(double norm_type = 2.0) const;
  /// An update for which all memory is there, and nothing is written yet.
  struct Update {
    StepOptions options;
    StepResult result;
    std::vector<double> scales;       // of each group's gradients; none: there is no gradient
    std::vector<Tensor> temporaries;  // what its batches read
  };
  Update begin_update(const GradientReport& own_report, const StepOptions& options);
  StepResult end_update(const Update& update);
  void tell_ranks_of_failure(const std::function<void()>& work) const;
  void show_flows(core::WorkSpan& span) const;
  /// Where ranks divide gradients and the report is of this rank's parts: that of all parts, by a
  /// collective. Else the report itself.
  GradientReport complete(const GradientReport& report) const;
  /// Warns of a skipped step, and throws GradientCollapse after so many in a row.
  void note_skip(const std::string& reason, std::vector<std::string> parameters,
                 int collapse_after);
  /// step() with gradients of this scaler, divided by `loss_scale`, too: f32 [1] on the device, or
  /// absent.
  StepResult step_on_device(const StepOptions& options, std::uint64_t scaler,
                            const TensorView& loss_scale);

  StepResult measure(const GradientReport& report, const StepOptions& options,
                     std::vector<double>& scales) const;
  double scaled_norm(const GradientReport& report, const std::vector<double>& scales) const;
  void fill_batches(const GradientReport& report, const std::vector<double>& scales,
                    std::vector<Tensor>& temporaries);
  kernels::UpdateEntry entry_of(Parameter& parameter, const Tensor& gradient, std::size_t moments,
                                std::vector<Tensor>& temporaries);
  TensorView master_of(const Parameter& parameter);
  void add_to_batches(std::size_t parameter, const kernels::UpdateEntry& entry);
  void cut_batches();
  std::vector<const Entries*> lists() const;  // of the batches, up to the first without any
  Call call_of(const Batch& batch, const std::vector<double>& scales) const;
  using UpdateBlock = std::function<void(const Batch&, const Entries&)>;
  void apply(const std::function<void()>& work);
  void has_written();  // what an update that stops there cannot take back
  void run_update(const std::vector<double>& scales);
  void run_blocks(const UpdateBlock& update_block);
  void run_batches(const std::vector<double>& scales, kernels::DeviceStep device);
  /// The same of a rule that updates_in_two_passes(), where entries are not whole tensors. A
  /// collective where ranks have parts.
  void run_batches_of_parts(const std::vector<double>& scales);
  void check_ended() const;             // throws where the last update stopped in the middle
  std::vector<Tensor> updated() const;  // those that have a gradient
  void tell_of_update() const;
  StepResult leave(std::string reason, const StepOptions& options);
  void finish(const StepOptions& options);

  static std::int64_t steps_of(const Parameter& parameter);
  std::shared_ptr<DeviceState> make_device_state();
  void check_capturable(const StepOptions& options) const;
  void write_rates();
  std::vector<Tensor> stepped_counts();
  void find_nonfinite(const StepOptions& options, const kernels::DeviceStep& device) const;
  void find_broken(bool checked, kernels::DeviceStep& device) const;
  void update_on_device(const StepOptions& options, const kernels::DeviceStep& device);

  StateDict whole_state() const;
  /// lr, weight_decay, and the betas, eps and momentum that hold for the group.
  StateDict options_of(const ParameterGroup& group) const;
  void tell_differences(const Loaded& loaded) const;
  void check_torch_has_it(bool decays) const;
  StateDict to_torch(const ParameterGroup& group) const;
  StateDict from_torch(const StateDict& theirs) const;

  std::vector<ParameterGroup> groups_;
  std::vector<Parameter> parameters_;
  std::vector<std::shared_ptr<GradientArena>> arenas_;
  std::vector<Batch> batches_;  // of the running update; their memory serves the next
  Partition partition_;         // that the parts are of
  StateOptions state_options_;
  std::shared_ptr<const LarcOptions> larc_;                          // null: none
  std::shared_ptr<DeviceState> device_;                              // null: not capturable
  std::shared_ptr<const void> identity_ = std::make_shared<char>();  // claims parameters
  SkipStreak skips_;     // since the last step that was applied
  std::string stopped_;  // an update that some blocks of weights have had, and why not all
  std::int64_t steps_ = 0;
  bool master_weights_ = true;
  bool scheduled_ = false;  // a Schedule sets the learning rates
};

/// Keeps what the rule was constructed with.
template <class Options>
class FusedOptimizer : public Optimizer {
 public:
  const Options& options() const { return options_; }

 protected:
  FusedOptimizer(std::vector<ParameterGroup> groups, const Options& options)
      : Optimizer(std::move(groups)), options_(options) {}
  Options options_;
};

}  // namespace cairn::optim
