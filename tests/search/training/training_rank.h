// What a rank does in the same way whether its modules are Cairn's or libtorch's: optimizers, amp,
// windows, epochs, files.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/amp/scaled_step.h"
#include "cairn/autograd/engine.h"
#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/optim/weight_average.h"
#include "system.h"

namespace cairn::stateful {

/// A part of the training state that this training does not have.
class Nothing : public core::Stateful {
 public:
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

class TrainingRank : public Rank {
 public:
  void add_group(int p, int optimizer) override {
    const auto o = static_cast<std::size_t>(optimizer);
    parameter(p).clear_grad();
    const Rule& rule = setup_.rules[o];
    optimizers_[o]->add_group(
        {.parameters = {named(p)}, .lr = rule.lr, .weight_decay = rule.decay});
  }

  void initialize(const Precision& precision) override {
    amp::Options options;
    options.opt_level = precision.level;
    options.half_dtype = precision.half;
    options.num_losses = kLosses;
    options.collapse_after = 0;
    options.fallback_after = precision.fallback ? 1000 : 0;
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
    start_amp(optimizers, options);
  }

  void backward(const Loss& loss, bool synchronise, unsigned optimizers) override {
    std::vector<parallel::DistributedDataParallel::NoSync> alone;
    for (auto* ddp : ddps()) alone.push_back(ddp->no_sync(!synchronise));
    backward_of(loss, 1.0, optimizers);
  }

  void accumulate(const Loss& loss, bool last, unsigned optimizers) override {
    if (!accumulation_) {
      accumulation_.emplace(
          optim::AccumulationOptions{.steps = 1000, .world = ddps().empty() ? World{} : world()});
    }
    const optim::MicroBatch micro = accumulation_->begin(samples_of(rank_), {.last = last});
    backward_of(loss, micro.weight(), optimizers);
  }

  void give_up_window() override { accumulation_->reset(); }

  Numbers epoch(const Epoch& epoch) override {
    Numbers applied;
    int taken = 0;
    const auto take_step = [&] {
      if (taken++ == epoch.cleared) clear_module();
      if (epoch.by_amp) {
        last_ = step_amp(nullptr, {});
        return applied.push_back(last_.applied ? 1.0 : 0.0);
      }
      for (const auto& optimizer : optimizers_) {
        last_ = optimizer->step();
        applied.push_back(last_.applied ? 1.0 : 0.0);
      }
    };
    const auto freeze = [&] {
      if (taken == epoch.freezes_at) set_trainable(epoch.frozen, epoch.thaws);
    };
    auto join = ddps().front()->join(epoch.divide_by);
    for (int k = 0; k < epoch.batches[static_cast<std::size_t>(rank_)]; ++k) {
      freeze();
      join.samples(samples_of(rank_));
      backward_of(epoch.loss, 1.0, 0);
      take_step();
    }
    while (join.other_ranks_have_batches()) {
      freeze();
      backward_of_zero(join.zero(), epoch);
      take_step();
    }
    named_.clear();  // of a forward that some ranks did not make
    return applied;
  }

  // The first two are neighbours, the others lie apart.
  Numbers reduce_views(std::uint64_t seed) override {
    if (!reducer_) {
      reducer_ = std::make_unique<parallel::Reducer>(
          ddp_group(), parallel::ReducerOptions{.first_bucket_bytes = 1, .bucket_bytes = 20});
      const Tensor together = Tensor::zeros({4});
      views_ = {together.alias(together.view().slice(0, 0, 3)),
                together.alias(together.view().slice(0, 3, 4)), Tensor::zeros({4}),
                Tensor::zeros({2})};
      reducer_->register_gradients(
          {{"a", views_[0]}, {"b", views_[1]}, {"c", views_[2]}, {"d", views_[3]}});
    }
    const Values values = view_values(seed, rank_);
    std::size_t at = 0;
    for (const Tensor& view : views_) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(at);
      kernels::copy(Tensor::from(Values(begin, begin + view.numel()), view.shape(), DType::f32),
                    view);
      at += static_cast<std::size_t>(view.numel());
    }
    for (std::size_t k = 0; k < views_.size(); ++k) {
      reducer_->mark_ready(
          (k * 3 + static_cast<std::size_t>(seed) + static_cast<std::size_t>(rank_)) % 4);
    }
    reducer_->wait();
    Numbers averages;
    for (const Tensor& view : views_) append(averages, view);
    return averages;
  }

  Numbers split(int colors, bool reversed) override {
    const int color = rank_ % colors;
    Part part{group_->split(color, reversed ? -rank_ : rank_), {}};
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      if (rank % colors == color) part.ranks.push_back(rank);
    }
    if (reversed) std::reverse(part.ranks.begin(), part.ranks.end());
    parts_.push_back(part);
    if (parts_.size() > 3) parts_.erase(parts_.begin());
    bool right = true;
    for (const Part& each : parts_) {
      const auto size = static_cast<std::int64_t>(each.ranks.size());
      const Tensor own = Tensor::full({1}, rank_), all = Tensor::zeros({size});
      each.group.all_gather(own, all, "part");
      right = right && all.to_vector() == Values(each.ranks.begin(), each.ranks.end());
    }
    return {right ? 1.0 : 0.0};
  }

  Numbers step(const Step& step) override {
    const optim::StepOptions options{
        .gradient_scale = step.window > 0 ? accumulation_->finish() : 1.0,
        .max_gradient_norm = step.max_norm,
        .per_group_norm = step.per_group,
        .keep_gradients = step.keep};
    const auto index = static_cast<std::size_t>(std::max(step.optimizer, 0));
    if (!step.by_amp) {
      last_ = optimizers_[index]->step(options);
    } else {
      last_ = step_amp(step.optimizer < 0 ? nullptr : optimizers_[index].get(), options);
    }
    for (std::size_t o = 0; o < schedules_.size() && step.schedule; ++o) {
      if (step.optimizer < 0 || o == index) schedules_[o]->step(last_);
    }
    return {last_.applied ? 1.0 : 0.0, last_.gradient_norm};
  }

  void edit_gradients(double factor) override {
    for (int p = 0; p < kParameters; ++p) {
      const Tensor gradient = parameter(p).grad();
      if (!parameter(p).requires_grad() || !gradient.defined()) continue;
      kernels::affine(gradient, factor, 0.0, gradient);
    }
  }

  void update_by_hand(double lr) override {
    for (int p = 0; p < kParameters; ++p) {
      const Tensor weight = parameter(p);
      const Tensor gradient =
          handle() != nullptr ? handle()->unscaled_gradient(weight) : weight.grad();
      if (!weight.requires_grad() || !gradient.defined()) continue;
      const Tensor step = Tensor::empty_like(weight);
      kernels::copy(gradient, step);
      kernels::axpby(-lr, step, 1.0, weight);
      weight.storage()->bump_version();
    }
    clear_module();
  }

  void adopt(const Loss& loss, unsigned optimizers) override {
    Loss plain = loss;
    plain.by_amp = false;
    backward_of(plain, handle()->loss_scale(loss.id), 0);
    for (std::size_t o = 0; o < optimizers_.size(); ++o) {
      if ((optimizers >> o & 1U) == 0) continue;
      handle()->adopt_gradients(*optimizers_[o], {.loss_id = loss.id});
    }
  }

  void scale_two(const Loss& first, const Loss& second) override { scale_two_of(first, second); }

  Numbers read_gradient(int p) override {
    try {
      const Tensor gradient = parameter(p).grad();
      return gradient.defined() ? gradient.to_vector() : Numbers();
    } catch (const core::InvalidArgument& error) {
      if (std::string(error.what()).find("unscale") == std::string::npos) throw;
      return {};
    }
  }

  void move_optimizer(int optimizer) override {
    const auto o = static_cast<std::size_t>(optimizer);
    schedules_[o].reset();
    moved_from_.push_back(std::move(optimizers_[o]));  // outlives amp's handle
    optimizers_[o] = moved(*moved_from_.back(), setup_.rules[o].kind);
    schedules_[o] = std::make_unique<optim::Schedule>(*optimizers_[o], optim::step_decay(2, 0.5));
  }

  void backward_delayed(const Loss& loss) override { backward_delayed_of(loss); }

  void replace(int optimizer) override {
    const auto o = static_cast<std::size_t>(optimizer);
    std::erase_if(larcs_, [&](const auto& larc) { return &larc->optimizer() == &*optimizers_[o]; });
    schedules_[o].reset();
    optimizers_[o].reset();
    optimizers_[o] = new_optimizer(o);
    start(*optimizers_[o], setup_.rules[o]);
    schedules_[o] = std::make_unique<optim::Schedule>(*optimizers_[o], optim::step_decay(2, 0.5));
  }

  Numbers unscale(int optimizer, unsigned parameters, double factor) override {
    handle()->unscale(*optimizers_[static_cast<std::size_t>(optimizer)]);
    Numbers all;
    for (int p = 0; p < kParameters; ++p) {
      if ((parameters >> p & 1U) == 0) continue;
      const Tensor gradient = parameter(p).grad();
      append(all, gradient);
      kernels::affine(gradient, factor, 0.0, gradient);
    }
    const auto finite = [](double x) { return std::isfinite(x); };
    return std::all_of(all.begin(), all.end(), finite) ? all : Numbers();
  }

  Numbers scaled_steps(const Loss& loss, int overflow_at) override {
    const amp::LossScalerOptions scaler{
        .init_scale = 16.0, .growth_interval = Scale::kInterval, .max_scale = Scale::kMax};
    amp::ScaledStep scaled(*optimizers_[0], scaler, group_ ? world() : World{});
    Numbers seen;
    for (int k = 0; k < kScaledSteps; ++k) {
      Loss own = loss;
      if (k == overflow_at) own.overflow_rank = 0;
      seen.push_back(scaled.scale());
      backward_of(own, scaled.scale(), 0);
      last_ = scaled.step();
      seen.push_back(last_.applied ? 1.0 : 0.0);
    }
    return seen;
  }

  void set_average(bool exists) override {
    if (!exists) return average_.reset();
    if (average_) return;
    NamedTensors weights;
    for (int p = 0; p < kParameters; ++p) weights.push_back(named(p));
    average_.emplace(weights, optim::WeightAverageOptions{.decay = 0.5, .equal = equal_average()});
  }
  void update_average() override { average_->update(); }
  Numbers use_average() override {
    const Seen before = look();
    Numbers during;
    {
      const optim::AveragesInUse averaged = average_->use();
      during = cloned_weights();
      model().state_dict();
    }
    return look() == before ? during : Numbers();
  }

  void clear(int optimizer) override {
    optimizers_[static_cast<std::size_t>(optimizer)]->clear_grad();
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
    const auto other = make_optimizer({{.parameters = {named(p)}}}, Rule{});
    Loss loss;
    loss.by_amp = false;
    backward(loss, true, 0);
    (void)optimizers_[static_cast<std::size_t>(optimizer)]->step();
    bool refused = false;
    try {
      (void)other->step();
    } catch (const core::Error&) {
      refused = true;
    }
    clear_module();
    return {refused ? 0.0 : 1.0};
  }

  Seen look() const override {
    Seen seen;
    std::vector<StateDict> states;
    for (const auto& optimizer : optimizers_) states.push_back(optimizer->state_dict());
    for (int p = 0; p < kParameters; ++p) {
      const Tensor tensor = parameter(p);
      Seen::Parameter& own = seen.parameters.emplace_back();
      own.weight = kernels::master_value(tensor).to_vector();
      own.raw = tensor.to_vector();
      own.dtype = tensor.dtype();
      for (std::size_t o = 0; o < states.size(); ++o) look_at_moments(o, states[o], p, own);
    }
    if (average_ && average_->updates() > 0) {
      for (const NamedTensor& average : average_->averages())
        seen.averages.push_back(average.tensor.to_vector());
    }
    for (const auto& optimizer : optimizers_) seen.lrs.push_back(optimizer->lr());
    for (int id = 0; handle() != nullptr && id < kLosses; ++id)
      seen.loss_scales.push_back(handle()->loss_scale(id));
    seen.named = named_;
    if (!last_.culprit.empty()) seen.named.push_back(last_.culprit);
    return seen;
  }

 protected:
  TrainingRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank)
      : setup_(setup), group_(std::move(group)), rank_(rank) {}

  // ---- What modules differ in

  /// As Cairn sees it.
  virtual Tensor parameter(int p) const = 0;
  virtual core::Stateful& model() = 0;
  /// None, one, or one a submodule.
  virtual std::vector<parallel::DistributedDataParallel*> ddps() const = 0;
  virtual void backward_of(const Loss& loss, double weight, unsigned optimizers) = 0;
  virtual void scale_two_of(const Loss& /*first*/, const Loss& /*second*/) {}
  virtual void backward_delayed_of(const Loss& /*loss*/) {}
  virtual void backward_of_zero(const Tensor& zero, const Epoch& epoch) {
    if (epoch.by_amp) {
      handle()->backward(zero, {.loss_id = epoch.loss.id});
    } else {
      autograd::backward(zero);
    }
  }
  virtual void start_amp(const std::vector<optim::Optimizer*>& optimizers,
                         const amp::Options& options) = 0;
  virtual const amp::Amp* handle() const = 0;  // null: no amp
  /// nullptr: every optimizer's.
  virtual optim::StepResult step_amp(optim::Optimizer* optimizer,
                                     const optim::StepOptions& options) = 0;
  virtual std::unique_ptr<optim::Optimizer> new_optimizer(std::size_t index) {
    return make_optimizer(groups_of(index), setup_.rules[index]);
  }
  virtual void look_at_moments(std::size_t /*optimizer*/, const StateDict& state, int p,
                               Seen::Parameter& own) const {
    const StateDict* entry =
        find_path(state, core::str("state.", kNames[static_cast<std::size_t>(p)]));
    if (entry == nullptr) return;
    own.updates = static_cast<int>(entry->integer("step"));
    for (const char* name : {"square_avg", "momentum_buffer", "sum", "exp_avg", "exp_avg_sq"}) {
      if (entry->contains(name)) own.moments.push_back(entry->tensor(name).to_vector());
    }
    if (entry->contains("norm") && !own.moments.empty()) {
      own.moments.push_back({entry->number("norm")});
    }
  }

  // ---- For these

  void build_optimizers() {
    for (std::size_t o = 0; o < setup_.rules.size(); ++o) {
      optimizers_.push_back(new_optimizer(o));
      start(*optimizers_.back(), setup_.rules[o]);
      schedules_.push_back(
          std::make_unique<optim::Schedule>(*optimizers_.back(), optim::step_decay(2, 0.5)));
    }
  }
  static std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParameterGroup> groups,
                                                          const Rule& rule) {
    if (rule.kind == Kind::adam) {
      return std::make_unique<optim::FusedAdam>(std::move(groups), optim::AdamOptions());
    }
    if (rule.kind == Kind::adagrad) {
      return std::make_unique<optim::FusedAdagrad>(std::move(groups), optim::AdagradOptions());
    }
    if (rule.kind == Kind::lamb) {
      return std::make_unique<optim::FusedLAMB>(std::move(groups), optim::LambOptions());
    }
    if (rule.kind == Kind::novograd) {
      return std::make_unique<optim::FusedNovoGrad>(std::move(groups), optim::NovoGradOptions());
    }
    if (rule.kind == Kind::rmsprop) {
      return std::make_unique<optim::FusedRMSprop>(
          std::move(groups), optim::RmsPropOptions{.momentum = rule.momentum});
    }
    return std::make_unique<optim::FusedSGD>(std::move(groups),
                                             optim::SgdOptions{.momentum = rule.momentum});
  }
  template <class O>
  static std::unique_ptr<optim::Optimizer> moved_as(optim::Optimizer& from) {
    return std::make_unique<O>(std::move(static_cast<O&>(from)));
  }
  static std::unique_ptr<optim::Optimizer> moved(optim::Optimizer& from, Kind kind) {
    if (kind == Kind::adam) return moved_as<optim::FusedAdam>(from);
    if (kind == Kind::adagrad) return moved_as<optim::FusedAdagrad>(from);
    if (kind == Kind::lamb) return moved_as<optim::FusedLAMB>(from);
    if (kind == Kind::novograd) return moved_as<optim::FusedNovoGrad>(from);
    if (kind == Kind::rmsprop) return moved_as<optim::FusedRMSprop>(from);
    return moved_as<optim::FusedSGD>(from);
  }
  bool belongs(int p, std::size_t optimizer) const {
    return setup_.optimizer_of[static_cast<std::size_t>(p)] == static_cast<int>(optimizer);
  }
  std::vector<optim::ParameterGroup> groups_of(std::size_t optimizer) const {
    const Rule& rule = setup_.rules[optimizer];
    std::vector<optim::ParameterGroup> groups;
    for (int g = 0; g < (rule.two_groups ? 2 : 1); ++g) {
      groups.push_back({.lr = g == 1 ? rule.lr / 2 : rule.lr, .weight_decay = rule.decay});
    }
    for (int p = 0; p < kParameters; ++p) {
      if (!belongs(p, optimizer)) continue;
      groups[static_cast<std::size_t>(setup_.group_of(p))].parameters.push_back(named(p));
    }
    return groups;
  }
  NamedTensor named(int p) const { return {kNames[static_cast<std::size_t>(p)], parameter(p)}; }

  /// Another object starts elsewhere, and so does another rank: DDP takes rank 0's values.
  Values initial(int p, bool fresh) const {
    Values values = initial_weight(p, fresh);
    if (setup_.ddp && rank_ > 0) values.assign(values.size(), 9.0);
    return values;
  }
  bool starts_frozen(int p) const { return (setup_.frozen >> p & 1U) != 0; }

  parallel::ProcessGroup ddp_group() const {
    return group_ ? *group_ : parallel::ProcessGroup::single();
  }

  parallel::DistributedOptions ddp_options() const {
    const Wiring& wiring = setup_.wiring;
    parallel::DistributedOptions options;  // buckets of one or two parameters each
    options.first_bucket_bytes = 16;
    options.bucket_bytes = 128;
    options.find_unused_parameters = setup_.find_unused;
    options.static_graph = wiring.static_graph;
    options.delay_allreduce = wiring.delay;
    options.num_allreduce_streams = wiring.streams ? 3 : 1;
    options.gradient_predivide_factor = wiring.predivide ? 2.0 : 1.0;
    options.allreduce_always_fp32 = wiring.fp32;
    options.retain_allreduce_buffers = wiring.retain;
    options.average = !wiring.sum;
    options.check_local_gradients = !wiring.unchecked;
    if (wiring.hook == Hook::f16) options.hook = parallel::compress_to(DType::f16);
    if (wiring.hook == Hook::power_sgd) {
      options.hook = parallel::power_sgd({.rank = 9, .start_step = 1, .min_compression_rate = 0.0});
    }
    if (wiring.hook == Hook::function) {
      options.hook = parallel::communication_hook(
          [](const parallel::GradientBucket& bucket, const parallel::ProcessGroup& group) {
            group.all_reduce(bucket.data, parallel::ReduceOp::mean, bucket.name);
          });
    }
    return options;
  }

  /// As this rank sees it.
  Loss own_loss(const Loss& loss) const {
    Loss own = loss;
    own.rank = rank_;
    own.reach = loss.reach_of(rank_);
    if (own.throwing_rank >= 0 && own.throwing_rank != rank_) own.thrower = -1;
    return own;
  }
  /// The coefficients of all parameters.
  Values input_of(const Loss& loss) const {
    Values x;
    for (int p = 0; p < kParameters; ++p) {
      const Values own = loss.coefficients(p, rank_);
      x.insert(x.end(), own.begin(), own.end());
    }
    return x;
  }
  amp::LossOptions loss_options(const Loss& loss, double weight, unsigned optimizers) const {
    amp::LossOptions options{
        .loss_id = loss.id, .weight = weight, .delay_overflow_check = loss.delayed};
    for (std::size_t o = 0; o < optimizers_.size(); ++o) {
      if ((optimizers >> o & 1U) != 0) options.optimizers.push_back(optimizers_[o].get());
    }
    return options;
  }

  static void append(Numbers& numbers, const Tensor& tensor) {
    const Values own = tensor.to_vector();
    numbers.insert(numbers.end(), own.begin(), own.end());
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

  Setup setup_;
  std::optional<parallel::ProcessGroup> group_;
  int rank_;
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers_;
  std::vector<std::unique_ptr<optim::Optimizer>> moved_from_;
  std::vector<std::unique_ptr<optim::LARC>> larcs_;  // around some of them
  std::vector<std::string> named_;                   // by messages of the last forward

 private:
  void start(optim::Optimizer& optimizer, const Rule& rule) {
    if (rule.larc) larcs_.push_back(std::make_unique<optim::LARC>(optimizer));
    if (!setup_.bf16_moments && !setup_.remainders) return;
    optim::StateOptions options;
    if (setup_.bf16_moments) options.moments = DType::bf16;
    if (setup_.remainders) options.masters = optim::MasterStorage::remainder;
    optimizer.set_state_options(options);
  }

  bool equal_average() const { return setup_.rules.size() > 1; }

  /// What amp is given: that of the one DDP, or the group's, which knows of no model.
  World world() const {
    const auto all = ddps();
    if (all.size() == 1) return all.front()->world();
    return group_ ? group_->world() : World{};
  }

  void with_state(bool amp_first, const std::function<void(checkpointing::TrainingState&)>& work) {
    using State = checkpointing::TrainingState;
    Nothing nothing;
    const auto part = [&](const std::string& name, core::Stateful* own) {
      return State::Part(name, own != nullptr ? *own : nothing);
    };
    const auto second = [](const auto& all) { return all.size() > 1 ? &*all.back() : nullptr; };
    const auto all = ddps();
    const State::Part weights = part("model", &model()),
                      precision = part("amp", const_cast<amp::Amp*>(handle()));
    State state({amp_first ? precision : weights, amp_first ? weights : precision,
                 part("optimizer0", optimizers_[0].get()), part("optimizer1", second(optimizers_)),
                 part("schedule0", schedules_[0].get()), part("schedule1", second(schedules_)),
                 part("average", average_ ? &*average_ : nullptr),
                 part("ddp", all.empty() ? nullptr : all.front()), part("ddp of b", second(all))},
                group_ ? group_->world() : World{});
    work(state);
  }

  std::vector<std::unique_ptr<optim::Schedule>> schedules_;
  std::optional<optim::Accumulation> accumulation_;
  std::optional<optim::WeightAverage> average_;
  optim::StepResult last_;
  std::unique_ptr<parallel::Reducer> reducer_;
  std::vector<Tensor> views_;  // of reducer_
  struct Part {
    parallel::ProcessGroup group;
    std::vector<int> ranks;
  };
  std::vector<Part> parts_;
};

}  // namespace cairn::stateful
