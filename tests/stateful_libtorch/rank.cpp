// A rank whose modules are libtorch's. Optimizers with an odd number, or with momentum, are libtorch's own.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/core/error.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/libtorch/libtorch.h"
#include "stateful/system.h"

namespace cairn::stateful {

namespace {

struct Thrower : torch::autograd::Function<Thrower> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x,
                               bool in_forward) {
    if (in_forward) throw std::runtime_error("expected memory, got none");
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list&) {
    throw std::runtime_error("expected memory, got none");
  }
};

/// A matrix [1, n] and a vector, as rank.cpp's, and a counter of its forwards.
struct PartImpl : torch::nn::Module {
  explicit PartImpl(int first_parameter) : first(first_parameter) {
    for (int k = 0; k < 2; ++k) {
      const std::string path = kNames[static_cast<std::size_t>(first + k)];
      const std::int64_t n = kSizes[static_cast<std::size_t>(first + k)];
      register_parameter(path.substr(2), torch::zeros(k == 0 ? std::vector<std::int64_t>{1, n}
                                                             : std::vector<std::int64_t>{n}));
    }
    forwards = register_buffer("forwards", torch::zeros({}, torch::kLong));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto own = parameters(false);
    const std::int64_t n = own[0].numel();
    const auto product = torch::linear(x.slice(0, 0, n).unsqueeze(0), throwing(own[0], 0));
    const auto y = throwing(own[1], 1) * x.slice(0, n);
    if (is_training()) forwards += 1;
    return product.sum() + y.sum();
  }
  torch::Tensor throwing(const torch::Tensor& w, int k) const {
    return loss->thrower == first + k ? Thrower::apply(w, loss->in_forward) : w;
  }
  int first;
  torch::Tensor forwards;
  const Loss* loss = nullptr;
};
TORCH_MODULE(Part);

/// Loss 1 recomputes a.
struct NetImpl : torch::nn::Module {
  NetImpl() : a(register_module("a", Part(0))), b(register_module("b", Part(2))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const std::int64_t of_a = kSizes[0] + kSizes[1];
    const auto call = [](Part part) {
      return [part](const torch::Tensor& in) mutable { return part->forward(in); };
    };
    torch::Tensor sum = torch::zeros({}, x.options());
    if ((loss->reach & 1U) != 0) {
      const auto in = x.slice(0, 0, of_a);
      sum = sum + (loss->id == 1 ? libtorch::checkpoint(call(a), in) : a->forward(in));
    }
    if ((loss->reach & 2U) != 0) sum = sum + b->forward(x.slice(0, of_a));
    return sum;
  }
  void set_loss(const Loss* own) { loss = a->loss = b->loss = own; }
  Part a, b;
  const Loss* loss = nullptr;
};
TORCH_MODULE(Net);

/// A part of the training state that this training does not have.
class Nothing : public core::Stateful {
 public:
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

Values values_of(const torch::Tensor& x) {
  const auto all = x.detach().to(torch::kDouble).contiguous();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

parallel::DistributedOptions options_of(const Setup& setup) {
  parallel::DistributedOptions options;  // buckets of one or two parameters each
  options.first_bucket_bytes = 16;
  options.bucket_bytes = 128;
  options.find_unused_parameters = setup.find_unused;
  options.static_graph = setup.wiring.static_graph;
  options.delay_allreduce = setup.wiring.delay;
  options.num_allreduce_streams = setup.wiring.streams ? 3 : 1;
  options.gradient_predivide_factor = setup.wiring.predivide ? 2.0 : 1.0;
  options.allreduce_always_fp32 = setup.wiring.fp32;
  options.retain_allreduce_buffers = setup.wiring.retain;
  options.average = !setup.wiring.sum;
  options.check_local_gradients = !setup.wiring.unchecked;
  if (setup.wiring.hook == Hook::f16) options.hook = parallel::compress_to(DType::f16);
  return options;
}

class LibtorchRank final : public Rank {
 public:
  LibtorchRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank,
               bool fresh)
      : setup_(setup), group_(std::move(group)), rank_(rank) {
    for (int p = 0; p < kParameters; ++p) {
      // Another object starts elsewhere, and so does another rank: DDP takes rank 0's values.
      Values initial = initial_weight(p, fresh);
      if (setup_.ddp && rank_ > 0) initial.assign(initial.size(), 9.0);
      torch::Tensor x = theirs(p);
      const torch::NoGradGuard no_grad;
      x.copy_(torch::tensor(initial, torch::kDouble).reshape(x.sizes()));
      if ((setup_.frozen >> p & 1U) != 0) x.set_requires_grad(false);
    }
    if (group_ && setup_.ddp) {
      model_ = std::make_unique<libtorch::Model>(*net_, *group_, options_of(setup_));
    } else {
      model_ = std::make_unique<libtorch::Model>(*net_);
    }
    build_optimizers();
    if (setup_.precision) initialize(*setup_.precision);
  }

  void add_group(int p, int optimizer) override {
    const auto o = static_cast<std::size_t>(optimizer);
    Tensor tensor = ours(p);
    tensor.clear_grad();
    optimizers_[o]->add_group(
        {.parameters = {{kNames[static_cast<std::size_t>(p)], tensor}}, .lr = setup_.rules[o].lr});
  }

  void set_trainable(int p, bool trainable) override { theirs(p).set_requires_grad(trainable); }

  void to(DType /*dtype*/) override {}

  void initialize(const Precision& precision) override {
    amp::Options options;
    options.opt_level = precision.level;
    options.half_dtype = precision.half;
    options.num_losses = kLosses;
    options.collapse_after = 0;
    options.scaler.init_scale = precision.scale;
    options.scaler.growth_interval = Scale::kInterval;
    options.scaler.max_scale = Scale::kMax;
    if (precision.dynamic) {
      options.dynamic_loss_scale = true;
    } else {
      options.loss_scale = precision.scale;
    }
    if (group_) options.world = world();
    std::vector<optim::Optimizer*> optimizers;
    for (const auto& optimizer : optimizers_) optimizers.push_back(optimizer.get());
    amp_.emplace(libtorch::initialize({model_.get()}, optimizers, options));
  }

  void release() override {
    amp_->release();
    amp_.reset();
  }

  void backward(const Loss& loss, bool synchronise, unsigned optimizers) override {
    const auto alone = model_->no_sync(!synchronise);
    backward_of(loss, 1.0, optimizers);
  }

  void accumulate(const Loss& loss, bool last, unsigned optimizers) override {
    if (!accumulation_) {
      accumulation_.emplace(optim::AccumulationOptions{.steps = 1000, .world = model_->world()});
    }
    const optim::MicroBatch micro = accumulation_->begin(samples_of(rank_), {.last = last});
    backward_of(loss, micro.weight(), optimizers);
  }

  void give_up_window() override { accumulation_->reset(); }

  Numbers epoch(const Epoch& epoch) override {
    Numbers applied;
    const auto take_step = [&] {
      if (epoch.by_amp) {
        last_ = amp_->step();
        return applied.push_back(last_.applied ? 1.0 : 0.0);
      }
      for (const auto& optimizer : optimizers_) {
        last_ = optimizer->step();
        applied.push_back(last_.applied ? 1.0 : 0.0);
      }
    };
    auto join = model_->ddp()->join(epoch.divide_by);
    for (int k = 0; k < epoch.batches[static_cast<std::size_t>(rank_)]; ++k) {
      join.samples(samples_of(rank_));
      backward_of(epoch.loss, 1.0, 0);
      take_step();
    }
    while (join.others_go_on()) {
      if (epoch.by_amp) {
        amp_->amp::Amp::backward(join.zero(), {.loss_id = epoch.loss.id});
      } else {
        autograd::backward(join.zero());
      }
      take_step();
    }
    return applied;
  }

  Numbers reduce_views(std::uint64_t seed) override {  // nothing of libtorch's
    Values sum(view_values(seed, 0).size(), 0.0);
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      const Values own = view_values(seed, rank);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += own[i] / setup_.ranks;
    }
    return sum;
  }
  Numbers split(int /*colors*/, bool /*reversed*/) override { return {1.0}; }  // the same

  Numbers step(const Step& step) override {
    const optim::StepOptions options{
        .gradient_scale = step.window > 0 ? accumulation_->finish() : 1.0,
        .max_gradient_norm = step.max_norm};
    const auto index = static_cast<std::size_t>(std::max(step.optimizer, 0));
    if (!step.by_amp) {
      follow();
      last_ = optimizers_[index]->step(options);
    } else {
      last_ = step.optimizer < 0 ? amp_->step(options) : amp_->step(*optimizers_[index], options);
    }
    for (std::size_t o = 0; o < schedules_.size() && step.schedule; ++o) {
      if (step.optimizer < 0 || o == index) schedules_[o]->step(last_);
    }
    return {last_.applied ? 1.0 : 0.0, last_.gradient_norm};
  }

  void clear(int optimizer) override {
    optimizers_[static_cast<std::size_t>(optimizer)]->clear_grad();
  }
  void clear_module() override {
    net_->zero_grad();
    for (int p = 0; p < kParameters;
         ++p) {  // what losses of several scales add up to is in no .grad
      if (ours(p).gradient_slot().has_sum()) ours(p).clear_grad();
    }
  }

  void write(int p, Write how) override {
    const torch::NoGradGuard no_grad;
    wrote_ = true;
    torch::Tensor x = theirs(p);
    if (how == Write::initialise) {
      x.fill_(0.5);
    } else if (how == Write::clamp) {
      x.clamp_min_(1.0);
    } else {
      x.mul_(0.5).add_(1.0);
    }
  }

  void save(const std::string& folder, bool amp_first, bool asynchronous) override {
    with_state(amp_first, [&](checkpointing::TrainingState& state) {
      if (!asynchronous) state.save(folder, 1);
      if (asynchronous) state.save_async(folder, 1);
      state.finish();
    });
  }

  void resume(const std::string& path, bool amp_first) override {
    with_state(amp_first, [&](checkpointing::TrainingState& state) { state.resume(path); });
  }

  Numbers give_to_another(int p, int optimizer) override {
    optim::FusedSGD other({{kNames[static_cast<std::size_t>(p)], ours(p)}}, {.lr = 0.125});
    Loss loss;
    loss.by_amp = false;
    backward(loss, true, 0);
    optimizers_[static_cast<std::size_t>(optimizer)]->step();
    bool refused = false;
    try {
      other.step();
    } catch (const core::Error&) {
      refused = true;
    }
    net_->zero_grad();
    return {refused ? 0.0 : 1.0};
  }

  Seen look() const override {
    Seen seen;
    if (std::exchange(wrote_, false)) follow();
    for (int p = 0; p < kParameters; ++p) {
      Seen::Parameter& own = seen.parameters.emplace_back();
      own.weight = kernels::master_value(ours(p)).to_vector();
      own.raw = values_of(theirs(p));
      own.dtype = libtorch::to_cairn(theirs(p).scalar_type());
      look_at_moments(p, own);
    }
    for (const auto& optimizer : optimizers_) seen.lrs.push_back(optimizer->lr());
    for (int id = 0; amp_ && id < kLosses; ++id) seen.loss_scales.push_back(amp_->loss_scale(id));
    if (!last_.culprit.empty()) seen.named.push_back(last_.culprit);
    return seen;
  }

  /// libtorch's modules are not cloned: what a state holds instead.
  Numbers cloned_weights() const override {
    Numbers all;
    const StateDict state = model_->state_dict();
    for (const std::string name : kNames) {
      const Values own = state.dict(name.substr(0, 1)).tensor(name.substr(2)).to_vector();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }

 private:
  World world() const { return model_->ddp() != nullptr ? model_->world() : group_->world(); }

  void build_optimizers() {
    for (std::size_t o = 0; o < setup_.rules.size(); ++o) {
      const Rule& rule = setup_.rules[o];
      NamedTensors own;
      std::vector<torch::Tensor> of_torch;
      for (int p = 0; p < kParameters; ++p) {
        if (setup_.optimizer_of[static_cast<std::size_t>(p)] != static_cast<int>(o)) continue;
        own.push_back({kNames[static_cast<std::size_t>(p)], ours(p)});
        of_torch.push_back(theirs(p));
      }
      const bool grows = std::count(setup_.optimizer_of.begin(), setup_.optimizer_of.end(), -1) > 0;
      const bool is_torchs = !grows && (o % 2 == 1 || rule.momentum > 0);
      torch_optimizers_.push_back(is_torchs ? optimizer_of_torch(of_torch, rule) : nullptr);
      optimizers_.push_back(
          is_torchs ? std::make_unique<libtorch::TorchOptimizer>(*model_, *torch_optimizers_.back())
                    : optimizer_of_cairn(own, rule));
      schedules_.push_back(
          std::make_unique<optim::Schedule>(*optimizers_.back(), optim::step_decay(2, 0.5)));
    }
  }

  static std::unique_ptr<torch::optim::Optimizer> optimizer_of_torch(
      const std::vector<torch::Tensor>& parameters, const Rule& rule) {
    if (rule.adam) {
      return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(rule.lr));
    }
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(rule.lr).momentum(rule.momentum));
  }
  static std::unique_ptr<optim::Optimizer> optimizer_of_cairn(const NamedTensors& parameters,
                                                              const Rule& rule) {
    if (rule.adam) {
      return std::make_unique<optim::FusedAdam>(
          parameters, optim::AdamOptions{.lr = rule.lr, .weight_decay = 0.0});
    }
    return std::make_unique<optim::FusedSGD>(
        parameters, optim::SgdOptions{.lr = rule.lr, .momentum = rule.momentum});
  }

  void backward_of(const Loss& loss, double weight, unsigned optimizers) {
    const Forwards expected = count(loss);
    const torch::Tensor value = loss_of(loss);
    if (!amp_ || !loss.by_amp) {
      model_->backward(weight == 1.0 ? value : value * weight);
    } else {
      amp::LossOptions options{
          .loss_id = loss.id, .weight = weight, .delay_overflow_check = loss.delayed};
      for (std::size_t o = 0; o < optimizers_.size(); ++o) {
        if ((optimizers >> o & 1U) != 0) options.optimizers.push_back(optimizers_[o].get());
      }
      amp_->backward(value, options);
    }
    if (setup_.ranks == 1 && forwards() != expected) {
      throw Mismatch("a forward that was recomputed counts twice");
    }
  }

  /// What Cairn's side alone is asked knows nothing of what libtorch's has changed since.
  void follow() const { model_->state_dict(); }

  using Forwards = std::array<std::int64_t, 2>;
  Forwards forwards() const {
    return {net_->a->forwards.item<std::int64_t>(), net_->b->forwards.item<std::int64_t>()};
  }
  /// After one of this loss.
  Forwards count(const Loss& loss) const {
    const Forwards now = forwards();
    const unsigned reach = loss.reach_of(rank_);
    return {now[0] + (reach & 1U), now[1] + (reach >> 1 & 1U)};
  }

  torch::Tensor loss_of(const Loss& loss) {
    Values x;
    for (int p = 0; p < kParameters; ++p) {
      const Values own = loss.coefficients(p, rank_);
      x.insert(x.end(), own.begin(), own.end());
    }
    loss_ = loss;
    loss_.reach = loss.reach_of(rank_);
    if (loss_.throwing_rank >= 0 && loss_.throwing_rank != rank_) loss_.thrower = -1;
    net_->set_loss(&loss_);
    const auto input = torch::tensor(x, torch::kFloat);
    if (loss.by_ddp) return model_->run(net_, input);
    return net_->forward(input.to(theirs(0).scalar_type())).to(torch::kFloat);
  }

  void with_state(bool amp_first, const std::function<void(checkpointing::TrainingState&)>& work) {
    using Part = checkpointing::TrainingState::Part;
    Nothing nothing;
    const auto or_nothing = [&](core::Stateful* part) -> core::Stateful& {
      return part != nullptr ? *part : nothing;
    };
    const bool two = optimizers_.size() > 1;
    const Part model("model", *model_), amp("amp", or_nothing(amp_ ? &*amp_ : nullptr));
    checkpointing::TrainingState state(
        {amp_first ? amp : model, amp_first ? model : amp, Part("optimizer0", *optimizers_[0]),
         Part("optimizer1", or_nothing(two ? optimizers_[1].get() : nullptr)),
         Part("schedule0", *schedules_[0]),
         Part("schedule1", or_nothing(two ? schedules_[1].get() : nullptr))},
        group_ ? group_->world() : World{});
    work(state);
  }

  void look_at_moments(int p, Seen::Parameter& own) const {
    for (std::size_t o = 0; o < optimizers_.size(); ++o) {
      if (torch_optimizers_[o]) {
        const auto& all = torch_optimizers_[o]->state();
        const auto found = all.find(theirs(p).unsafeGetTensorImpl());
        if (found != all.end()) look_at_moments(*found->second, own);
        continue;
      }
      const StateDict state = optimizers_[o]->state_dict();
      const StateDict* entry =
          find_path(state, core::str("state.", kNames[static_cast<std::size_t>(p)]));
      if (entry == nullptr) continue;
      own.updates = static_cast<int>(entry->integer("step"));
      for (const char* name : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
        if (entry->contains(name)) own.moments.push_back(entry->tensor(name).to_vector());
      }
    }
  }
  static void look_at_moments(torch::optim::OptimizerParamState& state, Seen::Parameter& own) {
    if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
      own.updates = static_cast<int>(adam->step());
      own.moments = {values_of(adam->exp_avg()), values_of(adam->exp_avg_sq())};
    } else if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
      if (sgd->momentum_buffer().defined()) own.moments = {values_of(sgd->momentum_buffer())};
    }
  }
  static const StateDict* find_path(const StateDict& root, const std::string& path) {
    const StateDict* at = &root;
    for (std::size_t begin = 0; at != nullptr && begin <= path.size();) {
      const std::size_t end = std::min(path.find('.', begin), path.size());
      const StateDict::Value* value = at->find(path.substr(begin, end - begin));
      at = value == nullptr ? nullptr : std::get_if<StateDict>(value);
      begin = end + 1;
    }
    return at;
  }

  torch::Tensor theirs(int p) const {
    const std::string name = kNames[static_cast<std::size_t>(p)];
    return (p < 2 ? net_->a : net_->b)->named_parameters()[name.substr(2)];
  }
  Tensor ours(int p) const { return model_->parameters()[static_cast<std::size_t>(p)].tensor; }

  Setup setup_;
  std::optional<parallel::ProcessGroup> group_;
  int rank_;
  Net net_;
  Loss loss_;
  std::unique_ptr<libtorch::Model> model_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> torch_optimizers_;  // null: Cairn's
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers_;
  std::vector<std::unique_ptr<optim::Schedule>> schedules_;
  std::optional<libtorch::Amp> amp_;
  std::optional<optim::Accumulation> accumulation_;
  optim::StepResult last_;
  mutable bool wrote_ = false;
};

}  // namespace

std::unique_ptr<Rank> make_rank(const Setup& setup, std::optional<parallel::ProcessGroup> group,
                                int rank, bool fresh) {
  return std::make_unique<LibtorchRank>(setup, std::move(group), rank, fresh);
}

/// A Model has its DDP from the start, and one.
Setup possible(Setup drawn) {
  drawn.order = Order::ddp_optimizer_amp;
  drawn.wiring.two_ddps = false;
  drawn.wiring.static_odd_reach = drawn.wiring.static_graph ? drawn.wiring.static_odd_reach : 0;
  if (drawn.wiring.hook != Hook::f16) drawn.wiring.hook = Hook::none;
  return drawn;
}

/// libtorch's Adam divides by a second moment that f16 rounds to zero.
Precision possible(Precision drawn) {
  drawn.fallback = false;
  if (drawn.level == amp::OptLevel::O3) drawn.half = DType::bf16;
  return drawn;
}

bool casts_without_amp() {
  return false;
}

}  // namespace cairn::stateful
