// A rank whose modules are libtorch's. Optimizers with an odd number, or with momentum, are
// libtorch's own.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "cairn/libtorch/libtorch.h"
#include "search/training/training_rank.h"

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
    if (is_training()) forwards += 1;
    if (loss->form != Form::linear) return product_of(own, x);
    const auto product = torch::linear(x.slice(0, 0, n).unsqueeze(0), throwing(own[0], 0));
    const auto y = throwing(own[1], 1) * x.slice(0, n);
    return product.sum() + y.sum();
  }
  torch::Tensor product_of(const std::vector<torch::Tensor>& own, const torch::Tensor& x) const {
    const std::int64_t n = own[0].numel(), both = own[1].numel();
    torch::Tensor v = throwing(own[1], 1);
    if (loss->form == Form::tanh) v = torch::tanh(v * 0.25);
    const auto row = torch::cat({v * x.slice(0, 0, both), x.slice(0, both, n)});
    return torch::linear(row.unsqueeze(0), throwing(own[0], 0)).sum();
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

Values values_of(const torch::Tensor& x) {
  const auto all = x.detach().to(torch::kDouble).contiguous();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

class LibtorchRank final : public TrainingRank {
 public:
  LibtorchRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank,
               bool fresh)
      : TrainingRank(setup, std::move(group), rank) {
    for (int p = 0; p < kParameters; ++p) {
      torch::Tensor x = theirs(p);
      const torch::NoGradGuard no_grad;
      x.copy_(torch::tensor(initial(p, fresh), torch::kDouble).reshape(x.sizes()));
      if (starts_frozen(p)) x.set_requires_grad(false);
    }
    if (setup_.ddp) {
      model_ = std::make_unique<libtorch::Model>(*net_, ddp_group(), ddp_options());
    } else {
      model_ = std::make_unique<libtorch::Model>(*net_);
    }
    build_optimizers();
    if (setup_.precision) initialize(*setup_.precision);
  }
  ~LibtorchRank() override {
    amp_.reset();
    optimizers_.clear();  // before libtorch's
  }

  void set_trainable(int p, bool trainable) override { theirs(p).set_requires_grad(trainable); }

  void to(DType /*dtype*/) override {}

  void release() override {
    amp_->release();
    amp_.reset();
  }

  void clear_module() override {
    net_->zero_grad();
    for (int p = 0; p < kParameters;
         ++p) {  // what losses of several scales add up to is in no .grad
      if (parameter(p).gradient_slot().has_sum()) parameter(p).clear_grad();
    }
  }

  void write(int p, Write how) override {
    const torch::NoGradGuard no_grad;
    wrote_ = true;
    torch::Tensor x = theirs(p);
    if (how == Write::element) {
      x.flatten()[0] = 0.75;
    } else if (how == Write::initialise) {
      x.fill_(0.5);
    } else if (how == Write::clamp) {
      x.clamp_min_(1.0);
    } else {
      x.mul_(0.5).add_(1.0);
    }
  }

  void write_by_torch(bool gradients) override {
    if (gradients) {
      torch::nn::utils::clip_grad_norm_(net_->parameters(), 1e-3);
    } else {
      torch::optim::SGD(net_->parameters(), torch::optim::SGDOptions(0.125)).step();
    }
  }

  Seen look() const override {
    if (std::exchange(wrote_, false)) follow();
    Seen seen = TrainingRank::look();
    for (int p = 0; p < kParameters; ++p) {
      Seen::Parameter& own = seen.parameters[static_cast<std::size_t>(p)];
      own.raw = values_of(theirs(p));
      own.dtype = libtorch::to_cairn(theirs(p).scalar_type());
    }
    return seen;
  }

  /// libtorch's modules are not cloned: what a state holds instead.
  Numbers cloned_weights() const override {
    Numbers all;
    const StateDict state = model_->state_dict();
    for (const std::string name : kNames)
      append(all, state.dict(name.substr(0, 1)).tensor(name.substr(2)));
    return all;
  }

 private:
  Tensor parameter(int p) const override {
    return model_->parameters()[static_cast<std::size_t>(p)].tensor;
  }
  torch::Tensor theirs(int p) const {
    const std::string name = kNames[static_cast<std::size_t>(p)];
    return (p < 2 ? net_->a : net_->b)->named_parameters()[name.substr(2)];
  }
  core::Stateful& model() override { return *model_; }
  std::vector<parallel::DistributedDataParallel*> ddps() const override {
    return model_->ddp() == nullptr
               ? std::vector<parallel::DistributedDataParallel*>()
               : std::vector<parallel::DistributedDataParallel*>{model_->ddp()};
  }
  const amp::Amp* handle() const override { return amp_ ? &*amp_ : nullptr; }
  void start_amp(const std::vector<optim::Optimizer*>& optimizers,
                 const amp::Options& options) override {
    amp_.emplace(libtorch::initialize({model_.get()}, optimizers, options));
  }
  optim::StepResult step_amp(optim::Optimizer* optimizer,
                             const optim::StepOptions& options) override {
    return optimizer == nullptr ? amp_->step(options) : amp_->step(*optimizer, options);
  }
  std::unique_ptr<optim::Optimizer> new_optimizer(std::size_t index) override {
    const Rule& rule = setup_.rules[index];
    const auto& owners = setup_.optimizer_of;
    const bool grows = std::count(owners.begin(), owners.end(), -1) > 0;
    const bool is_torchs = !grows && (index % 2 == 1 || rule.momentum > 0);
    torch_optimizers_.push_back(is_torchs ? optimizer_of_torch(index) : nullptr);
    if (!is_torchs) return TrainingRank::new_optimizer(index);
    return std::make_unique<libtorch::TorchOptimizer>(*model_, *torch_optimizers_.back());
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer_of_torch(std::size_t index) const {
    const Rule& rule = setup_.rules[index];
    std::vector<torch::Tensor> own;
    for (int p = 0; p < kParameters; ++p) {
      if (belongs(p, index)) own.push_back(theirs(p));
    }
    if (rule.kind == Kind::adam)
      return std::make_unique<torch::optim::Adam>(own, torch::optim::AdamOptions(rule.lr));
    return std::make_unique<torch::optim::SGD>(
        own, torch::optim::SGDOptions(rule.lr).momentum(rule.momentum));
  }

  void look_at_moments(std::size_t optimizer, const StateDict& state, int p,
                       Seen::Parameter& own) const override {
    if (!torch_optimizers_[optimizer])
      return TrainingRank::look_at_moments(optimizer, state, p, own);
    const auto& all = torch_optimizers_[optimizer]->state();
    const auto found = all.find(theirs(p).unsafeGetTensorImpl());
    if (found == all.end()) return;
    if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(found->second.get())) {
      own.updates = static_cast<int>(adam->step());
      own.moments = {values_of(adam->exp_avg()), values_of(adam->exp_avg_sq())};
    } else if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get())) {
      if (sgd->momentum_buffer().defined()) own.moments = {values_of(sgd->momentum_buffer())};
    }
  }

  void backward_of(const Loss& loss, double weight, unsigned optimizers) override {
    const Forwards expected = count(loss);
    const torch::Tensor value = loss_of(loss);
    if (amp_ && loss.by_amp) {
      amp_->backward(value, loss_options(loss, weight, optimizers));
    } else {
      model_->backward(weight == 1.0 ? value : value * weight);
    }
    if (setup_.ranks == 1 && forwards() != expected) {
      throw Mismatch("a forward that was recomputed counts twice");
    }
  }

  void backward_of_zero(const Tensor& zero, const Epoch& epoch) override {
    if (epoch.by_amp) {
      amp_->backward(zero, amp::LossOptions{.loss_id = epoch.loss.id});
    } else {
      model_->backward(zero);
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
    loss_ = own_loss(loss);
    net_->set_loss(&loss_);
    const auto input = torch::tensor(input_of(loss), torch::kFloat);
    if (loss.by_ddp) return model_->run(net_, input);
    return net_->forward(input.to(theirs(0).scalar_type())).to(torch::kFloat);
  }

  Net net_;
  Loss loss_;
  std::unique_ptr<libtorch::Model> model_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> torch_optimizers_;  // null: Cairn's
  std::optional<libtorch::Amp> amp_;
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
  for (Rule& rule : drawn.rules) {  // as libtorch has it
    rule.decay = 0.0;
    rule.larc = rule.two_groups = false;
    if (rule.kind != Kind::adam) rule.kind = Kind::sgd;
  }
  drawn.bf16_moments = drawn.remainders = false;
  return drawn;
}

Precision possible(Precision drawn) {
  drawn.fallback = false;
  return drawn;
}

bool has_cairns_modules() {
  return false;
}

bool casts_without_amp() {
  return false;
}

}  // namespace cairn::stateful
