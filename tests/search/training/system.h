// The system under test: what one rank of a job holds, and the ranks in step.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/amp/explain.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/nn/module.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/optim.h"
#include "cairn/optim/schedule.h"
#include "cairn/parallel/distributed.h"
#include "reference.h"

namespace cairn::stateful {

inline constexpr int kParameters = 4;
inline constexpr int kLosses = 2;
/// Of two submodules a and b. One is called like an entry of an optimizer's state.
inline constexpr std::array<const char*, kParameters> kNames{"a.weight", "a.step", "b.weight",
                                                             "b.bias"};
inline constexpr std::array<int, kParameters> kSizes{3, 2, 2, 1};

/// Initial values that no half type represents; `fresh` tells those of another object apart.
Values initial_weight(int parameter, bool fresh);

/// Samples of a rank's micro-batch, and by what that multiplies its loss in an accumulation. Two or
/// four ranks have 2 on average.
inline std::int64_t samples_of(int rank) {
  return rank % 2 == 0 ? 1 : 3;
}
inline double weight_of(int rank, int ranks) {
  return ranks == 1 ? 1.0 : static_cast<double>(samples_of(rank)) / 2.0;
}

/// A linear one is the sum over parameters p of c_p * w_p, so that its gradient is c_p. That of
/// another form depends on the weights that its forward saw: of a product exactly so in every
/// dtype, as a coefficient is then a power of two, and the same on all ranks.
struct Loss {
  int id = 0;
  unsigned reach = 3;  // bit 0: submodule a, bit 1: b
  double size = 1.0;   // a power of two
  bool by_amp = true;
  bool by_ddp = true;      // ddp(x), or the module's own call
  bool to_all = true;      // says that it reaches every optimizer, not only those that it does
  bool delayed = false;    // LossOptions::delay_overflow_check
  int overflow_rank = -1;  // whose first coefficient is inf; -1: none's, 2: all ranks'
  int thrower = -1;        // the parameter at which an operation throws; -1: none
  bool in_forward = false;
  int throwing_rank = -1;  // -1: all of them
  Form form = Form::linear;
  bool apart = false;      // scale_loss() and its backward, with looks at everything in between
  bool twice = false;      // two backwards of it, with retain_graph
  int rank = 0;            // that it is seen by
  unsigned odd_reach = 0;  // reach of ranks with odd numbers; 0: as that of the others

  unsigned reach_of(int rank) const { return rank % 2 == 1 && odd_reach != 0 ? odd_reach : reach; }
  bool reaches(int parameter, int rank) const {
    return (reach_of(rank) >> (parameter / 2) & 1U) != 0;
  }
  /// On any rank.
  bool reaches(int parameter) const { return reaches(parameter, 0) || reaches(parameter, 1); }
  /// The first that it reaches.
  int first() const { return (reach & 1U) != 0 ? 0 : 2; }
  Values coefficients(int parameter, int rank) const;
};

struct Precision {
  amp::OptLevel level = amp::OptLevel::O0;
  DType half = DType::f16;
  bool dynamic = false;
  double scale = 1.0;  // of both losses; of a dynamic one at the start
  bool fallback = false;

  Scale scale_of_loss() const { return {dynamic, scale}; }
};

enum class Order { optimizer_ddp_amp, ddp_optimizer_amp, optimizer_amp_ddp };

/// How gradients travel: whatever is chosen, the same ones come out.
enum class Hook { none, function, f16, power_sgd };
struct Wiring {
  Hook hook = Hook::none;
  bool delay = false, streams = false, predivide = false, fp32 = false, retain = false;
  bool sum = false;        // average off
  bool unchecked = false;  // check_local_gradients off
  bool two_ddps = false;   // one of each submodule
  bool sync_norm = false;  // batch norms over all ranks' batches
  bool static_graph = false;
  unsigned static_odd_reach = 0;  // odd_reach of all losses then
};

struct Setup {
  int ranks = 1;  // of what a resume makes anew: 0 as many as before
  Order order = Order::optimizer_ddp_amp;
  bool ddp = false;
  bool find_unused = false;
  Wiring wiring;
  std::vector<int> optimizer_of;  // by parameter; -1: add_group brings it later
  std::vector<Rule> rules;
  bool bf16_moments = false;
  bool remainders = false;  // what masters of half weights keep: these are bf16 then
  unsigned frozen = 0;      // before anything is built; a bit each
  std::optional<Precision> precision;

  /// That of its optimizer which a parameter is in from the start.
  int group_of(int parameter) const {
    const int o = optimizer_of[static_cast<std::size_t>(parameter)];
    return o >= 0 && rules[static_cast<std::size_t>(o)].two_groups ? parameter % 2 : 0;
  }
  bool may_be(const std::optional<Precision>& p) const {
    return !remainders || !p || p->half == DType::bf16;
  }
};

enum class Write { initialise, clamp, average, element };

struct Step {
  bool by_amp = true;
  int optimizer = -1;  // -1: all, by amp only
  double max_norm = 0.0;
  bool schedule = false;
  bool keep = false;       // keep_gradients
  bool per_group = false;  // clips each group by its own norm
  int window = 0;          // > 0: ends an accumulation of so many micro-batches
};

/// An epoch whose ranks have batches of their own number.
struct Epoch {
  Loss loss;
  std::vector<int> batches;  // by rank
  parallel::DivideBy divide_by = parallel::DivideBy::participants;
  bool by_amp = false;
  int cleared = -1;     // the step whose gradients the module clears after their backward
  int freezes_at = -1;  // the step before which this parameter is frozen, or thawed
  int frozen = 0;
  bool thaws = false;
};

/// Numbers that every rank must agree on, bit for bit.
using Numbers = std::vector<double>;

/// What one rank of a job holds: modules of Cairn's (rank.cpp), or of libtorch's
/// (../stateful_libtorch).
class Rank {
 public:
  virtual ~Rank() = default;

  virtual void add_group(int parameter, int optimizer) = 0;
  virtual void set_trainable(int parameter, bool trainable) = 0;
  virtual void to(DType dtype) = 0;
  virtual void initialize(const Precision& precision) = 0;
  virtual void release() = 0;
  /// optimizers: those that the loss says it reaches, a bit each; 0: all.
  virtual void backward(const Loss& loss, bool synchronise, unsigned optimizers) = 0;
  /// The same as a micro-batch of an optim::Accumulation.
  virtual void accumulate(const Loss& loss, bool last, unsigned optimizers) = 0;
  virtual void give_up_window() = 0;
  /// Whether each of its steps was applied.
  virtual Numbers epoch(const Epoch& epoch) = 0;
  /// A pass of a reducer over gradients of this rank's own, marked in an order of its own;
  /// averages.
  virtual Numbers reduce_views(std::uint64_t seed) = 0;
  static Values view_values(std::uint64_t seed, int rank);
  /// Splits the group, keeps the part and sums up over every part so far: 1 where all sums are
  /// right.
  virtual Numbers split(int colors, bool reversed) = 0;
  /// applied, norm.
  virtual Numbers step(const Step& step) = 0;
  virtual void clear(int optimizer) = 0;
  virtual void clear_module() = 0;
  virtual void write(int parameter, Write how) = 0;
  /// libtorch's own clip_grad_norm_, or a step of its own optimizer: nothing elsewhere.
  virtual void write_by_torch(bool /*gradients*/) {}
  /// Multiplies what grad() gives of every parameter that requires one.
  virtual void edit_gradients(double factor) = 0;
  /// The trainer's own step of plain SGD, by gradients without a loss scale; clears them.
  virtual void update_by_hand(double lr) = 0;
  /// A plain backward of the loss times its scale, which amp then adopts for these optimizers, a
  /// bit each.
  virtual void adopt(const Loss& loss, unsigned optimizers) = 0;
  /// scale_loss() of both, then both backwards.
  virtual void scale_two(const Loss& first, const Loss& second) = 0;
  /// What grad() gives; nothing where it says that the rest lies elsewhere.
  virtual Numbers read_gradient(int parameter) = 0;
  /// It goes on in another object; its schedule begins anew.
  virtual void move_optimizer(int optimizer) = 0;
  /// With LossOptions::delay_unscale: no step before another backward of this loss.
  virtual void backward_delayed(const Loss& loss) = 0;
  /// What amp's unscale() makes of this optimizer's gradients, those of these parameters, a bit
  /// each; then times `factor`. Nothing where some are not finite.
  virtual Numbers unscale(int optimizer, unsigned parameters, double factor) = 0;
  /// Backwards by hand at the scale of an amp::ScaledStep of the only optimizer, and its steps, of
  /// which one overflows: each one's scale, and whether it was applied.
  virtual Numbers scaled_steps(const Loss& loss, int overflow_at) = 0;
  static constexpr int kScaledSteps = 4;
  /// Has an average of the weights, or none.
  virtual void set_average(bool exists) = 0;
  virtual void update_average() = 0;
  /// A clone's weights while the averages are in use; nothing where that leaves a trace.
  virtual Numbers use_average() = 0;
  /// Another optimizer of the same kind in place of this one, whose moments are gone.
  virtual void replace(int optimizer) = 0;
  virtual void save(const std::string& folder, bool amp_first, bool asynchronous) = 0;
  virtual void resume(const std::string& path, bool amp_first) = 0;
  /// A second optimizer of this parameter, a plain backward of every parameter, a step of its own
  /// optimizer and one of the second. Returns whether the last went through; throws where the
  /// construction does.
  virtual Numbers give_to_another(int parameter, int optimizer) = 0;

  /// What can be seen from outside.
  struct Seen {
    struct Parameter {
      Values weight;  // in full precision
      Values raw;     // as a forward sees it
      DType dtype = DType::f32;
      std::optional<int> updates;  // unset: the optimizer does not count
      std::vector<Values> moments;
      bool operator==(const Parameter&) const = default;
    };
    std::vector<Parameter> parameters;
    std::vector<Values> averages;  // of the weights; none: there is no average, or no update of it
    Values lrs;                    // of each optimizer's first group
    Values loss_scales;            // none without amp
    std::vector<std::string> named;  // parameters, by messages of the last forward and step
    bool operator==(const Seen&) const = default;
  };
  virtual Seen look() const = 0;
  /// The rank's own: of a mean and variance, then of b. Nothing where there are no batch norms.
  virtual Numbers statistics() const { return {}; }
  /// A clone's weights, in full precision, one after another.
  virtual Numbers cloned_weights() const = 0;
};

/// fresh: with other weights.
std::unique_ptr<Rank> make_rank(const Setup& setup, std::optional<parallel::ProcessGroup> group,
                                int rank, bool fresh);
/// What ranks of this kind are tried with: drawn, or the nearest that they can do.
Setup possible(Setup drawn);
Precision possible(Precision drawn);
/// They know other forms of losses than linear ones, and gradients that a trainer changes itself.
bool has_cairns_modules();
/// Whether weights may change their dtype without amp.
bool casts_without_amp();

/// Thrown where the library did what the reference does not know.
class Mismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The next work has little memory.
struct Refusal {
  std::size_t left = 0;   // bytes beyond those that are live
  bool gives_up = false;  // else the work is tried again with all memory
};

class Worker;

/// The same work on every rank at once: rank 0 in the caller's thread, the others in one of their
/// own each.
class System {
 public:
  explicit System(const Setup& setup);
  ~System();
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  struct Outcome {
    std::string error;  // of rank 0; empty: none threw
    Numbers numbers;
    std::string refused = {};  // what the work threw when it met a Refusal; empty: nothing
    bool threw() const { return !error.empty(); }
    bool met_refusal() const { return !refused.empty(); }
    bool gave_up() const { return met_refusal() && error == refused; }
  };
  /// work(rank), which returns Numbers or nothing. Throws Mismatch where one rank throws and
  /// another does not, or their numbers differ.
  template <class Work>
  Outcome each(Work work) {
    const auto numbers_of = [&](std::size_t index) -> Numbers {
      if constexpr (std::is_void_v<decltype(work(*ranks_[index]))>) {
        work(*ranks_[index]);
        return {};
      } else {
        return work(*ranks_[index]);
      }
    };
    return refusal_ ? refused(numbers_of) : together(numbers_of);
  }
  /// The next each(), of one rank, meets it. Weights and moments are as they were where it throws.
  void refuse_next(const Refusal& refusal) { refusal_ = refusal; }
  /// The same where one rank may throw and another not: what befell each. work(rank, its number)
  std::vector<Outcome> apart(const std::function<void(Rank&, int)>& work);
  /// Ends every object and makes new ones.
  Outcome rebuild(const Setup& setup, bool fresh);

  /// Throws Mismatch, naming what, where ranks see different things.
  Rank::Seen look();
  std::vector<Numbers> statistics();  // by rank
  const std::string& folder() const { return folder_; }

 private:
  void resize(int ranks);
  std::vector<Outcome> on_each(const std::function<Numbers(std::size_t)>& work);
  Outcome together(const std::function<Numbers(std::size_t)>& work);
  Outcome refused(const std::function<Numbers(std::size_t)>& work);

  Setup setup_;
  std::optional<Refusal> refusal_;
  std::string folder_;
  std::vector<std::unique_ptr<Worker>> workers_;  // of ranks 1, 2 ...
  std::vector<parallel::ProcessGroup> groups_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace cairn::stateful
