// Trainings of the tests of sharding: the same one with DistributedDataParallel, with
// ShardedDataParallel, and what both end with.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optim.h"
#include "cairn/parallel/sharded.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "support/tensors.h"

namespace cairn::test {

constexpr std::int64_t kInputs = 7, kHidden = 139, kOutputs = 5;

/// The same values in every training, and on whatever device.
inline Tensor values(const Shape& shape, std::uint64_t seed) {
  return Tensor::from(normal_tensor(shape, seed).to_vector<float>(), shape);
}

/// Sizes that no number of ranks divides, one above the chunks of sums over a tensor; a tied
/// weight, a norm that stays f32 at O2, and a scale of one element.
class OddNet : public nn::Module {
 public:
  OddNet() {
    manual_seed(11);
    first_ = add_module("first", nn::Linear(kInputs, kHidden));
    norm_ = add_module("norm", nn::BatchNorm1d(kHidden));
    tied_ = add_module("tied", nn::Linear(kHidden, kHidden));
    last_ = add_module("last", nn::Linear(kHidden, kOutputs));
    scale_ = add_parameter("scale", Tensor::full({1}, 1.0));
  }
  std::string kind() const override { return "OddNet"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = autograd::tanh((*norm_)((*first_)(x)));
    y = autograd::tanh((*tied_)(y));
    y = autograd::tanh((*tied_)(y));
    return autograd::mul((*last_)(y), scale_);
  }
  /// Of a batch, which a number stands for; what TrainingOf asks of a net.
  static Tensor batch(std::uint64_t seed) { return values({4, kInputs}, seed + 1000); }
  static Tensor loss(const Tensor& y, std::uint64_t seed) {
    return autograd::mse_loss(y, values({4, kOutputs}, seed + 900000));
  }

 private:
  std::shared_ptr<nn::Linear> first_, tied_, last_;
  std::shared_ptr<nn::BatchNorm1d> norm_;
  Tensor scale_;
};

using Make = std::function<std::unique_ptr<optim::Optimizer>(NamedTensors)>;

template <class Rule, class Options>
Make make(const Options& options) {
  return [options](NamedTensors parameters) {
    return std::make_unique<Rule>(std::move(parameters), options);
  };
}

struct Recipe {
  std::string name;
  Make optimizer;
  amp::OptLevel level = amp::OptLevel::O2;
  DType half = DType::bf16;
  optim::StateOptions states = {};
  bool larc = false;
  double max_norm = 0.0;                // clips
  bool accumulates = false;             // two micro-batches a step
  bool reduces_each = false;            // each of them; the averages are summed in f32
  std::int64_t overflow = 0;            // in this step, on rank 1
  int losses = 1;                       // a step, with scales of their own
  std::int64_t growth_interval = 2000;  // of the loss scale
  bool syncs_batch_norm = false;        // over all ranks
  bool in_turn = false;                 // of a batch one rank alone has a loss that is not zero
};

inline std::ostream& operator<<(std::ostream& out, const Recipe& recipe) {
  return out << recipe.name;
}

const Recipe kAdam{.name = "adam",
                   .optimizer = make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2})};

inline Tensor inputs(const parallel::ProcessGroup& group, std::uint64_t seed,
                     std::int64_t width = kInputs) {
  return normal_tensor({4, width}, seed * 16 + static_cast<unsigned>(group.rank()));
}

/// Of tests that compare bits: NCCL adds up more of them in an order of its own (Recipe::in_turn
/// makes any order alike).
inline int ranks_in_order() {
  return core::default_device().is_cuda() ? 2 : 3;
}

inline Tensor loss_of(const Tensor& y) {
  return autograd::mean(autograd::mul(y, y));
}

using Stage = std::optional<parallel::ZeroStage>;  // nothing: DistributedDataParallel
constexpr Stage kPlain{}, kStates{parallel::ZeroStage::optimizer_states},
    kGradients{parallel::ZeroStage::gradients}, kParameters{parallel::ZeroStage::parameters};

inline std::unique_ptr<parallel::DistributedDataParallel> data_parallel(
    nn::Module& model, const parallel::ProcessGroup& group, Stage stage,
    parallel::ShardedOptions options = {}) {
  if (!stage)
    return std::make_unique<parallel::DistributedDataParallel>(model, group, options.distributed);
  options.stage = *stage;
  return std::make_unique<parallel::ShardedDataParallel>(model, group, options);
}

/// Everything of one rank's training. The order of the members is that of construction.
template <class Net>
class TrainingOf {
 public:
  TrainingOf(const Recipe& recipe, const parallel::ProcessGroup& group, Stage stage,
             const parallel::ShardedOptions& sharded = {})
      : recipe_(recipe), group_(group), stage_(stage) {
    if (recipe.syncs_batch_norm) parallel::convert_sync_batch_norm(net, group);
    ddp_ = data_parallel(net, group, stage, sharded);
    optimizer = recipe.optimizer(net.parameters());
    optimizer->set_state_options(recipe.states);
    if (recipe.larc) larc_.emplace(*optimizer);
    amp::Options options{.opt_level = recipe.level,
                         .half_dtype = recipe.half,
                         .num_losses = recipe.losses,
                         .world = ddp_->world()};
    options.max_gradient_norm = recipe.max_norm;
    options.scaler.init_scale = 4096;
    options.scaler.growth_interval = recipe.growth_interval;
    precision.emplace(amp::initialize(net, *optimizer, options));
    state = std::make_unique<checkpointing::TrainingState>(
        std::vector<checkpointing::TrainingState::Part>{
            {"model", net}, {"optimizer", *optimizer}, {"amp", *precision}, {"ddp", *ddp_}},
        ddp_->world());
  }

  optim::StepResult step() {
    const std::int64_t now = ++steps_;
    if (recipe_.accumulates && !recipe_.reduces_each) {
      const auto no_sync = ddp_->no_sync();
      precision->backward(loss(2 * now));
    } else if (recipe_.accumulates) {
      precision->backward(loss(2 * now));
      if (!stage_ || *stage_ < parallel::ZeroStage::gradients) (void)optimizer->stash();
    }
    for (int id = 0; id < recipe_.losses; ++id) {
      backward(2 * now + 1 + 1000 * id, overflows(now, id) ? 1 : -1, id);
    }
    return precision->step();
  }

  /// Its next step is the one after this.
  void go_on_after(std::int64_t step) { steps_ = step; }

  /// Of a batch of this rank's own.
  Tensor forward(std::int64_t batch) { return (*ddp_)(Net::batch(seed_of(batch))); }
  void backward(std::int64_t batch, int overflows_on, int loss_id = 0) {
    const double infinity = std::numeric_limits<double>::infinity();
    const Tensor all = loss(batch);
    precision->backward(group_.rank() == overflows_on ? autograd::affine(all, infinity, 0.0) : all,
                        {.loss_id = loss_id});
  }

  parallel::DistributedDataParallel& ddp() { return *ddp_; }
  /// While it lives, weights are whole.
  parallel::GatheredParameters gather() { return ddp_->gather_parameters(); }

  Net net;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::optional<amp::Amp> precision;
  std::unique_ptr<checkpointing::TrainingState> state;

 private:
  /// The last loss and, where there are several, three steps later the first one.
  bool overflows(std::int64_t step, int loss_id) const {
    if (recipe_.overflow == 0) return false;
    const bool is_last = loss_id + 1 == recipe_.losses;
    return is_last ? step == recipe_.overflow : loss_id == 0 && step == recipe_.overflow + 3;
  }
  std::uint64_t seed_of(std::int64_t batch) const {
    return static_cast<std::uint64_t>(batch * 16 + group_.rank());
  }
  Tensor loss(std::int64_t batch) {
    const Tensor own = Net::loss(forward(batch), seed_of(batch));
    const bool rests = (batch + batch / 2) % group_.world_size() != group_.rank();
    return recipe_.in_turn && rests ? autograd::affine(own, 0.0, 0.0) : own;
  }

  Recipe recipe_;
  parallel::ProcessGroup group_;
  Stage stage_;
  std::unique_ptr<parallel::DistributedDataParallel> ddp_;
  std::optional<optim::LARC> larc_;
  std::int64_t steps_ = 0;
};

using Training = TrainingOf<OddNet>;

/// Every tensor and shard of a state by its full name.
inline void tensors_of(const StateDict& state, const std::string& path,
                       std::vector<std::pair<std::string, StateDict::Value>>& all) {
  for (const auto& [key, value] : state) {
    const std::string name = path.empty() ? key : path + "." + key;
    if (const auto* child = std::get_if<StateDict>(&value)) {
      tensors_of(*child, name, all);
    } else if (std::holds_alternative<Tensor>(value) || std::holds_alternative<Shard>(value)) {
      all.emplace_back(name, value);
    }
  }
}

/// "" where a rank's state is what `whole` has at its places; adds up the elements of shards.
inline std::string difference_in_parts(const StateDict& own, const StateDict& whole,
                                       std::int64_t& sharded_elements) {
  std::vector<std::pair<std::string, StateDict::Value>> a, b;
  tensors_of(own, "", a);
  tensors_of(whole, "", b);
  if (a.size() != b.size()) {
    return core::str("expected ", b.size(), " tensors, got ", a.size());
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].first != b[i].first) return core::str(a[i].first, " in place of ", b[i].first);
    const auto expected = std::get<Tensor>(b[i].second).to_vector<double>();
    const auto* shard = std::get_if<Shard>(&a[i].second);
    const Tensor tensor = shard != nullptr ? shard->tensor : std::get<Tensor>(a[i].second);
    const auto got = tensor.to_vector<double>();
    const auto begin = static_cast<std::size_t>(shard != nullptr ? shard->begin : 0);
    if (shard != nullptr) sharded_elements += tensor.numel();
    if (shard == nullptr && got.size() != expected.size()) return a[i].first + " is not whole";
    for (std::size_t k = 0; k < got.size(); ++k) {
      if (got[k] == expected[begin + k]) continue;
      return core::str(a[i].first, "[", begin + k, "] is ", got[k], ", expected ",
                       expected[begin + k]);
    }
  }
  return "";
}

/// "" where the weights that the models compute with have the same bits.
inline std::string difference_of_weights(const nn::Module& a, const nn::Module& b) {
  const NamedTensors left = a.parameters(), right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i].tensor.to_vector<double>() != right[i].tensor.to_vector<double>()) {
      return left[i].name;
    }
  }
  return "";
}

/// The same of trainings whose weights may lie in parts.
template <class Net>
std::string difference_of_weights(TrainingOf<Net>& a, TrainingOf<Net>& b) {
  const auto left = a.gather(), right = b.gather();
  return difference_of_weights(a.net, b.net);
}

/// The same of weights, masters, buffers, moments and loss scales. `whole` is in no parts.
template <class Net>
std::string difference_of_states(TrainingOf<Net>& own, TrainingOf<Net>& whole) {
  std::int64_t elements = 0;
  std::string all = difference_of_weights(own, whole);
  for (const auto& [part, other] :
       {std::pair(own.optimizer->state_dict(), whole.optimizer->state_dict()),
        std::pair(own.net.state_dict(), whole.net.state_dict())}) {
    if (all.empty()) all = difference_in_parts(part, other, elements);
  }
  const int losses = whole.precision->options().num_losses;
  for (int loss = 0; all.empty() && loss < losses; ++loss) {
    const double scale = own.precision->loss_scale(loss);
    const double expected = whole.precision->loss_scale(loss);
    if (scale != expected)
      all = core::str("the scale of loss ", loss, " is ", scale, ", expected ", expected);
  }
  return all;
}

}  // namespace cairn::test
