// A rank whose modules are Cairn's.
#include <algorithm>
#include <utility>

#include "cairn/amp/explain.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/init.h"
#include "system.h"

namespace cairn::stateful {

// ---- The model

namespace {

constexpr std::int64_t kCoefficients = 8;

/// Hands its input on; breaks off in its forward or in its backward.
struct Thrower {
  static constexpr autograd::OpInfo kInfo{"thrower"};
  bool in_forward = false;
  Tensor forward(autograd::Context& /*context*/, const Tensor& x) const {
    if (in_forward) core::fail<core::OutOfMemory>("thrower", "expected memory, got none");
    Tensor y = Tensor::empty_like(x);
    kernels::copy(x, y);
    return y;
  }
  autograd::Tensors backward(autograd::Context& /*context*/, const Tensor& /*dy*/) const {
    core::fail<core::OutOfMemory>("thrower", "expected memory, got none");
  }
};

/// A matrix [1, n], whose gradient a product makes, and a vector, whose gradient a multiplication
/// makes.
class Part : public nn::Module {
 public:
  explicit Part(int first) : first_(first) {
    for (int k = 0; k < 2; ++k) {
      const int p = first + k;
      const std::string path = kNames[static_cast<std::size_t>(p)];
      const std::int64_t n = kSizes[static_cast<std::size_t>(p)];
      const Shape shape = k == 0 ? Shape{1, n} : Shape{n};
      add_parameter(path.substr(2), Tensor::from(initial_weight(p, false), shape, DType::f32));
    }
  }
  std::string kind() const override { return "Part"; }
  Tensor forward(const Tensor& x) override {
    const NamedTensors own = parameters();
    const std::int64_t n = own[0].tensor.numel();
    const Tensor row = autograd::reshape(autograd::slice(x, 0, 0, n), {1, n});
    const Tensor rest = autograd::slice(x, 0, n, x.size(0));
    const Tensor product = autograd::linear(row, throwing(own[0].tensor, 0));
    const Tensor y = autograd::mul(throwing(own[1].tensor, 1), rest);
    return autograd::add(autograd::sum(product), autograd::sum(y));
  }
  const Loss* loss = nullptr;

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Part>(first_); }

 private:
  Tensor throwing(const Tensor& w, int k) const {
    const bool throws = loss != nullptr && loss->thrower == first_ + k;
    return throws ? autograd::apply(Thrower{loss->in_forward}, w) : w;
  }
  int first_;
};

}  // namespace

class Net : public nn::Module {
 public:
  Net() : a_(add_module("a", Part(0))), b_(add_module("b", Part(2))) {}
  std::string kind() const override { return "Net"; }
  Tensor forward(const Tensor& x) override {
    return through([&](const Tensor& of_a) { return (*a_)(of_a); },
                   [&](const Tensor& of_b) { return (*b_)(of_b); }, x);
  }
  /// The same with the submodules called by others.
  template <class A, class B>
  Tensor through(A&& a, B&& b, const Tensor& x) const {
    const std::int64_t of_a = kSizes[0] + kSizes[1];
    Tensor sum;
    if ((loss_->reach & 1U) != 0) sum = a(autograd::slice(x, 0, 0, of_a));
    if ((loss_->reach & 2U) == 0) return sum;
    const Tensor rest = b(autograd::slice(x, 0, of_a, kCoefficients));
    return sum.defined() ? autograd::add(sum, rest) : rest;
  }
  nn::Module& a() const { return *a_; }
  nn::Module& b() const { return *b_; }
  void set_loss(const Loss* loss) { loss_ = a_->loss = b_->loss = loss; }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Net>(); }

 private:
  std::shared_ptr<Part> a_, b_;
  const Loss* loss_ = nullptr;
};

// ---- One rank

namespace {

std::unique_ptr<optim::Optimizer> make_optimizer(NamedTensors parameters, const Rule& rule) {
  if (rule.adam) {
    return std::make_unique<optim::FusedAdam>(
        std::move(parameters), optim::AdamOptions{.lr = rule.lr, .weight_decay = 0.0});
  }
  return std::make_unique<optim::FusedSGD>(
      std::move(parameters), optim::SgdOptions{.lr = rule.lr, .momentum = rule.momentum});
}

const StateDict* find_path(const StateDict& root, const std::string& path) {
  const StateDict* at = &root;
  for (std::size_t begin = 0; at != nullptr && begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const StateDict::Value* value = at->find(path.substr(begin, end - begin));
    at = value == nullptr ? nullptr : std::get_if<StateDict>(value);
    begin = end + 1;
  }
  return at;
}

/// A part of the training state that this training does not have.
class Nothing : public core::Stateful {
 public:
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

}  // namespace

namespace {

/// One rank that trains modules of Cairn's.
class CairnRank final : public Rank {
 public:
  CairnRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank, bool fresh);

  void add_group(int parameter, int optimizer) override;
  void set_trainable(int parameter, bool trainable) override;
  void to(DType dtype) override;
  void initialize(const Precision& precision) override;
  void release() override;
  void backward(const Loss& loss, bool synchronise, unsigned optimizers) override;
  void accumulate(const Loss& loss, bool last, unsigned optimizers) override;
  void give_up_window() override;
  Numbers epoch(const Epoch& epoch) override;
  Numbers reduce_views(std::uint64_t seed) override;
  Numbers split(int colors, bool reversed) override;
  Numbers step(const Step& step) override;
  void clear(int optimizer) override;
  void clear_module() override;
  void write(int parameter, Write how) override;
  void save(const std::string& folder, bool amp_first, bool asynchronous) override;
  void resume(const std::string& path, bool amp_first) override;
  Numbers give_to_another(int parameter, int optimizer) override;
  Seen look() const override;
  Numbers cloned_weights() const override;

 private:
  void build_optimizers();
  void build_ddp();
  World world() const;
  void with_state(bool amp_first, const std::function<void(checkpointing::TrainingState&)>& work);
  Tensor loss_of(const Loss& loss);
  void backward_of(const Loss& loss, double weight, unsigned optimizers);
  Tensor parameter(int parameter) const;

  Setup setup_;
  std::optional<parallel::ProcessGroup> group_;
  int rank_;
  std::unique_ptr<Net> net_;
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers_;
  std::vector<std::unique_ptr<optim::Schedule>> schedules_;
  std::vector<std::unique_ptr<parallel::DistributedDataParallel>>
      ddps_;  // none, one, or one a submodule
  std::unique_ptr<parallel::Reducer> reducer_;
  std::vector<Tensor> views_;  // of reducer_
  struct Part {
    parallel::ProcessGroup group;
    std::vector<int> ranks;
  };
  std::vector<Part> parts_;
  std::optional<amp::Amp> amp_;
  std::optional<optim::Accumulation> accumulation_;
  optim::StepResult last_;
  std::vector<std::string> named_;
};

}  // namespace

CairnRank::CairnRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank,
                     bool fresh)
    : setup_(setup), group_(std::move(group)), rank_(rank), net_(std::make_unique<Net>()) {
  for (int p = 0; p < kParameters; ++p) {
    // Another object starts elsewhere, and so does another rank: DDP takes rank 0's values.
    Values initial = initial_weight(p, fresh);
    if (setup_.ddp && rank_ > 0) initial.assign(initial.size(), 9.0);
    const Tensor tensor = parameter(p);
    kernels::copy(Tensor::from(initial, tensor.shape(), DType::f32), tensor);
    tensor.storage()->bump_version();
    if ((setup_.frozen >> p & 1U) != 0) set_trainable(p, false);
  }
  if (setup_.order == Order::ddp_optimizer_amp) build_ddp();
  build_optimizers();
  if (setup_.order == Order::optimizer_ddp_amp) build_ddp();
  if (setup_.precision) initialize(*setup_.precision);
  if (setup_.order == Order::optimizer_amp_ddp) build_ddp();
}

void CairnRank::build_optimizers() {
  for (int o = 0; o < static_cast<int>(setup_.rules.size()); ++o) {
    NamedTensors own;
    for (int p = 0; p < kParameters; ++p) {
      if (setup_.optimizer_of[static_cast<std::size_t>(p)] != o) continue;
      own.push_back({kNames[static_cast<std::size_t>(p)], parameter(p)});
    }
    optimizers_.push_back(make_optimizer(own, setup_.rules[static_cast<std::size_t>(o)]));
    schedules_.push_back(
        std::make_unique<optim::Schedule>(*optimizers_.back(), optim::step_decay(2, 0.5)));
  }
}

namespace {

parallel::DistributedOptions options_of(const Setup& setup) {
  const Wiring& wiring = setup.wiring;
  parallel::DistributedOptions options;  // buckets of one or two parameters each
  options.first_bucket_bytes = 16;
  options.bucket_bytes = 128;
  options.find_unused_parameters = setup.find_unused;
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

}  // namespace

void CairnRank::build_ddp() {
  if (!setup_.ddp) return;
  const parallel::ProcessGroup group = group_ ? *group_ : parallel::ProcessGroup::single();
  const auto add = [&](nn::Module& module) {
    ddps_.push_back(
        std::make_unique<parallel::DistributedDataParallel>(module, group, options_of(setup_)));
  };
  if (!setup_.wiring.two_ddps) return add(*net_);
  add(net_->a());
  add(net_->b());
}

/// What amp is given: that of the one DDP, or the group's, which knows of no model.
World CairnRank::world() const {
  if (ddps_.size() == 1) return ddps_[0]->world();
  return group_ ? group_->world() : World{};
}

void CairnRank::add_group(int p, int optimizer) {
  Tensor tensor = parameter(p);
  tensor.clear_grad();
  const auto o = static_cast<std::size_t>(optimizer);
  optimizers_[o]->add_group(
      {.parameters = {{kNames[static_cast<std::size_t>(p)], tensor}}, .lr = setup_.rules[o].lr});
}

void CairnRank::set_trainable(int p, bool trainable) {
  parameter(p).set_requires_grad(trainable);
}

void CairnRank::to(DType dtype) {
  net_->to(dtype);
}

void CairnRank::initialize(const Precision& precision) {
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
  amp_ = amp::initialize({net_.get()}, optimizers, options);
}

void CairnRank::release() {
  amp_->release();
  amp_.reset();
}

Tensor CairnRank::loss_of(const Loss& loss) {
  Values x;
  for (int p = 0; p < kParameters; ++p) {
    const Values own = loss.coefficients(p, rank_);
    x.insert(x.end(), own.begin(), own.end());
  }
  Loss own = loss;
  own.reach = loss.reach_of(rank_);
  if (own.throwing_rank >= 0 && own.throwing_rank != rank_) own.thrower = -1;
  net_->set_loss(&own);
  const DType dtype = amp_ ? DType::f32 : parameter(0).dtype();
  const Tensor input = Tensor::from(x, {kCoefficients}, dtype);
  const amp::Explain explain;
  const auto forward = [&] {
    if (ddps_.empty() || !loss.by_ddp) return (*net_)(input);
    if (ddps_.size() == 1) return (*ddps_[0])(input);
    // amp casts what enters and leaves the model, which nobody calls here.
    const auto half = [&](const Tensor& x) { return autograd::to(x, parameter(0).dtype()); };
    const auto a = [&](const Tensor& x) { return (*ddps_[0])(half(x)); };
    const auto b = [&](const Tensor& x) { return (*ddps_[1])(half(x)); };
    return autograd::to(net_->through(a, b, input), dtype);
  };
  named_.clear();
  const Tensor value = forward();
  for (const amp::ExplainMisfit& misfit : explain.report().misfits) {
    const bool same_on_all = loss.odd_reach == 0 && loss.throwing_rank < 0;
    if (same_on_all && !misfit.where.empty()) named_.push_back(misfit.where);
  }
  return value;
}

void CairnRank::backward(const Loss& loss, bool synchronise, unsigned optimizers) {
  std::vector<parallel::DistributedDataParallel::NoSync> alone;
  for (const auto& ddp : ddps_) alone.push_back(ddp->no_sync(!synchronise));
  backward_of(loss, 1.0, optimizers);
}

void CairnRank::accumulate(const Loss& loss, bool last, unsigned optimizers) {
  if (!accumulation_) {
    accumulation_.emplace(
        optim::AccumulationOptions{.steps = 1000, .world = ddps_.empty() ? World{} : world()});
  }
  const optim::MicroBatch micro = accumulation_->begin(samples_of(rank_), {.last = last});
  backward_of(loss, micro.weight(), optimizers);
}

Numbers CairnRank::epoch(const Epoch& epoch) {
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
  auto join = ddps_[0]->join(epoch.divide_by);
  for (int k = 0; k < epoch.batches[static_cast<std::size_t>(rank_)]; ++k) {
    join.samples(samples_of(rank_));
    backward_of(epoch.loss, 1.0, 0);
    take_step();
  }
  while (join.others_go_on()) {
    if (epoch.by_amp) {
      amp_->backward(join.zero(), {.loss_id = epoch.loss.id});
    } else {
      autograd::backward(join.zero());
    }
    take_step();
  }
  named_.clear();  // of a forward that some ranks did not make
  return applied;
}

// The first two are neighbours, the others lie apart.
Numbers CairnRank::reduce_views(std::uint64_t seed) {
  if (!reducer_) {
    const parallel::ProcessGroup group = group_ ? *group_ : parallel::ProcessGroup::single();
    reducer_ = std::make_unique<parallel::Reducer>(
        group, parallel::DistributedOptions{.first_bucket_bytes = 1, .bucket_bytes = 20});
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
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      view.data<float>()[i] = static_cast<float>(values[at++]);
    }
  }
  for (std::size_t k = 0; k < views_.size(); ++k) {
    reducer_->mark_ready(
        (k * 3 + static_cast<std::size_t>(seed) + static_cast<std::size_t>(rank_)) % 4);
  }
  reducer_->wait();
  Numbers averages;
  for (const Tensor& view : views_) {
    const Values own = view.to_vector();
    averages.insert(averages.end(), own.begin(), own.end());
  }
  return averages;
}

Numbers CairnRank::split(int colors, bool reversed) {
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

void CairnRank::give_up_window() {
  accumulation_->reset();
}

void CairnRank::backward_of(const Loss& loss, double weight, unsigned optimizers) {
  const Tensor value = loss_of(loss);
  if (!amp_ || !loss.by_amp) {
    return autograd::backward(weight == 1.0 ? value : autograd::affine(value, weight, 0.0));
  }
  amp::LossOptions options{
      .loss_id = loss.id, .weight = weight, .delay_overflow_check = loss.delayed};
  for (std::size_t o = 0; o < optimizers_.size(); ++o) {
    if ((optimizers >> o & 1U) != 0) options.optimizers.push_back(optimizers_[o].get());
  }
  amp_->backward(value, options);
}

Numbers CairnRank::step(const Step& step) {
  const optim::StepOptions options{
      .gradient_scale = step.window > 0 ? accumulation_->finish() : 1.0,
      .max_gradient_norm = step.max_norm};
  const auto index = static_cast<std::size_t>(std::max(step.optimizer, 0));
  if (!step.by_amp) {
    last_ = optimizers_[index]->step(options);
  } else {
    last_ = step.optimizer < 0 ? amp_->step(options) : amp_->step(*optimizers_[index], options);
  }
  for (std::size_t o = 0; o < schedules_.size() && step.schedule; ++o) {
    if (step.optimizer < 0 || o == index) schedules_[o]->step(last_);
  }
  return {last_.applied ? 1.0 : 0.0, last_.gradient_norm};
}

void CairnRank::clear(int optimizer) {
  optimizers_[static_cast<std::size_t>(optimizer)]->clear_grad();
}

void CairnRank::clear_module() {
  net_->clear_grad();
}

void CairnRank::write(int p, Write how) {
  const Tensor tensor = parameter(p);
  if (how == Write::initialise) return nn::init::constant(tensor, 0.5);
  if (how == Write::clamp) {
    const Tensor limit = Tensor::full(tensor.shape(), 1.0, tensor.dtype());
    const Tensor clamped = Tensor::empty_like(tensor);
    kernels::binary(kernels::BinaryOp::maximum, tensor, limit, clamped);
    kernels::copy(clamped, tensor);
  } else {
    const Tensor other = Tensor::full(tensor.shape(), 2.0, tensor.dtype());
    kernels::axpby(0.5, other, 0.5, tensor);
  }
  tensor.storage()->bump_version();
}

void CairnRank::save(const std::string& folder, bool amp_first, bool asynchronous) {
  with_state(amp_first, [&](checkpointing::TrainingState& state) {
    if (!asynchronous) state.save(folder, 1);
    if (asynchronous) state.save_async(folder, 1);
    state.finish();
  });
}

void CairnRank::resume(const std::string& path, bool amp_first) {
  with_state(amp_first, [&](checkpointing::TrainingState& state) { state.resume(path); });
}

void CairnRank::with_state(bool amp_first,
                           const std::function<void(checkpointing::TrainingState&)>& work) {
  using Part = checkpointing::TrainingState::Part;
  Nothing nothing;
  const auto or_nothing = [&](core::Stateful* part) -> core::Stateful& {
    return part != nullptr ? *part : nothing;
  };
  const bool two = optimizers_.size() > 1;
  const Part model("model", *net_), amp("amp", or_nothing(amp_ ? &*amp_ : nullptr));
  checkpointing::TrainingState state(
      {amp_first ? amp : model, amp_first ? model : amp, Part("optimizer0", *optimizers_[0]),
       Part("optimizer1", or_nothing(two ? optimizers_[1].get() : nullptr)),
       Part("schedule0", *schedules_[0]),
       Part("schedule1", or_nothing(two ? schedules_[1].get() : nullptr)),
       Part("ddp", or_nothing(ddps_.empty() ? nullptr : ddps_.front().get())),
       Part("ddp of b", or_nothing(ddps_.size() < 2 ? nullptr : ddps_.back().get()))},
      group_ ? group_->world() : World{});
  work(state);
}

Numbers CairnRank::give_to_another(int p, int optimizer) {
  const auto other = make_optimizer({{kNames[static_cast<std::size_t>(p)], parameter(p)}}, Rule{});
  Loss loss;
  loss.by_amp = false;
  backward(loss, true, 0);
  optimizers_[static_cast<std::size_t>(optimizer)]->step();
  bool refused = false;
  try {
    other->step();
  } catch (const core::Error&) {
    refused = true;
  }
  net_->clear_grad();
  return {refused ? 0.0 : 1.0};
}

Tensor CairnRank::parameter(int p) const {
  return net_->parameters()[static_cast<std::size_t>(p)].tensor;
}

Numbers CairnRank::cloned_weights() const {
  Numbers all;
  for (const NamedTensor& parameter : net_->clone()->parameters()) {
    const Values own = kernels::master_value(parameter.tensor).to_vector();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

Rank::Seen CairnRank::look() const {
  Seen seen;
  std::vector<StateDict> states;
  for (const auto& optimizer : optimizers_) states.push_back(optimizer->state_dict());
  for (int p = 0; p < kParameters; ++p) {
    const Tensor tensor = parameter(p);
    Seen::Parameter& own = seen.parameters.emplace_back();
    own.weight = kernels::master_value(tensor).to_vector();
    own.raw = tensor.to_vector();
    own.dtype = tensor.dtype();
    for (const StateDict& state : states) {
      const StateDict* all = find_path(state, "state");
      const StateDict* entry =
          all == nullptr ? nullptr : find_path(*all, kNames[static_cast<std::size_t>(p)]);
      if (entry == nullptr) continue;
      own.updates = static_cast<int>(entry->integer("step"));
      for (const char* name : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
        if (entry->contains(name)) own.moments.push_back(entry->tensor(name).to_vector());
      }
    }
  }
  for (const auto& optimizer : optimizers_) seen.lrs.push_back(optimizer->lr());
  for (int id = 0; amp_ && id < kLosses; ++id) seen.loss_scales.push_back(amp_->loss_scale(id));
  seen.named = named_;
  if (!last_.culprit.empty()) seen.named.push_back(last_.culprit);
  return seen;
}

std::unique_ptr<Rank> make_rank(const Setup& setup, std::optional<parallel::ProcessGroup> group,
                                int rank, bool fresh) {
  return std::make_unique<CairnRank>(setup, std::move(group), rank, fresh);
}

Setup possible(Setup drawn) {
  return drawn;
}

Precision possible(Precision drawn) {
  return drawn;
}

bool casts_without_amp() {
  return true;
}

}  // namespace cairn::stateful
