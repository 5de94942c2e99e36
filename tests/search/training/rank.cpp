// A rank whose modules are Cairn's.
#include <utility>

#include "cairn/amp/explain.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/ops.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/init.h"
#include "cairn/nn/norm.h"
#include "cairn/parallel/sync_batch_norm.h"
#include "training_rank.h"

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
    norm_ = add_module(
        "norm", nn::BatchNorm1d(
                    kSizes[static_cast<std::size_t>(first + 1)],
                    {.eps = NormBatch::kEps, .momentum = NormBatch::kMomentum, .affine = false}));
  }
  std::string kind() const override { return "Part"; }
  Tensor forward(const Tensor& x) override {
    const NamedTensors own = parameters();
    const std::int64_t n = own[0].tensor.numel();
    if (loss != nullptr && loss->form == Form::norm) return norm_of(own);
    if (loss != nullptr && loss->form != Form::linear) return product_of(own, x);
    const Tensor row = autograd::reshape(autograd::slice(x, 0, 0, n), {1, n});
    const Tensor rest = autograd::slice(x, 0, n, x.size(0));
    const Tensor product = autograd::linear(row, throwing(own[0].tensor, 0));
    const Tensor y = autograd::mul(throwing(own[1].tensor, 1), rest);
    return autograd::add(autograd::sum(product), autograd::sum(y));
  }
  const Loss* loss = nullptr;
  const nn::BatchNorm1d& norm() const { return *norm_; }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Part>(first_); }

 private:
  Tensor product_of(const NamedTensors& own, const Tensor& x) const {
    const std::int64_t n = own[0].tensor.numel(), both = own[1].tensor.numel();
    Tensor v = throwing(own[1].tensor, 1);
    if (loss->form == Form::tanh) v = autograd::tanh(autograd::affine(v, 0.25, 0.0));
    const Tensor row = autograd::concat(
        {autograd::mul(v, autograd::slice(x, 0, 0, both)), autograd::slice(x, 0, both, n)});
    return autograd::sum(
        autograd::linear(autograd::reshape(row, {1, n}), throwing(own[0].tensor, 0)));
  }
  Tensor norm_of(const NamedTensors& own) const {
    constexpr std::size_t kSamples = NormBatch::kSamples;
    const auto n = static_cast<std::size_t>(own[0].tensor.numel());
    const auto both = static_cast<std::size_t>(own[1].tensor.numel());
    const Values c = loss->coefficients(first_, loss->rank);
    const auto constant = [](const Values& values, std::size_t columns) {
      return Tensor::from(values, {static_cast<std::int64_t>(kSamples), std::int64_t(columns)},
                          DType::f32);
    };
    Values x, z, factors, rest;
    for (std::size_t k = 0; k < kSamples; ++k) {
      for (std::size_t i = 0; i < n; ++i) {
        if (i >= both) rest.push_back(k == 0 ? c[i] : 0.0);
        if (i >= both) continue;
        x.push_back(NormBatch::x(k, i, loss->rank));
        z.push_back(NormBatch::z(k, i, loss->rank));
        factors.push_back(NormBatch::d(k, loss->rank) * c[i]);
      }
    }
    const Tensor h =
        autograd::add(autograd::mul(constant(x, both), own[1].tensor), constant(z, both));
    const Tensor y = autograd::mul((*norm_)(h), constant(factors, both));
    const Tensor row = autograd::concat({y, constant(rest, n - both)}, 1);
    return autograd::sum(autograd::linear(row, own[0].tensor));
  }
  Tensor throwing(const Tensor& w, int k) const {
    const bool throws = loss != nullptr && loss->thrower == first_ + k;
    return throws ? autograd::apply(Thrower{loss->in_forward}, w) : w;
  }
  int first_;
  std::shared_ptr<nn::BatchNorm1d> norm_;
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
  Part& a() const { return *a_; }
  Part& b() const { return *b_; }
  void set_loss(const Loss* loss) { loss_ = a_->loss = b_->loss = loss; }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Net>(); }

 private:
  std::shared_ptr<Part> a_, b_;
  const Loss* loss_ = nullptr;
};

// ---- One rank

namespace {

class CairnRank final : public TrainingRank {
 public:
  CairnRank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank, bool fresh)
      : TrainingRank(setup, std::move(group), rank) {
    for (int p = 0; p < kParameters; ++p) {
      const Tensor tensor = parameter(p);
      kernels::copy(Tensor::from(initial(p, fresh), tensor.shape(), DType::f32), tensor);
      tensor.storage()->bump_version();
      if (starts_frozen(p)) set_trainable(p, false);
    }
    if (setup_.wiring.sync_norm && group_) parallel::convert_sync_batch_norm(*net_, *group_);
    if (setup_.order == Order::ddp_optimizer_amp) build_ddp();
    build_optimizers();
    if (setup_.order == Order::optimizer_ddp_amp) build_ddp();
    if (setup_.precision) initialize(*setup_.precision);
    if (setup_.order == Order::optimizer_amp_ddp) build_ddp();
  }

  void set_trainable(int p, bool trainable) override { parameter(p).set_requires_grad(trainable); }

  void to(DType dtype) override { net_->to(dtype); }

  void release() override {
    amp_->release();
    amp_.reset();
  }

  void clear_module() override { net_->clear_grad(); }

  void write(int p, Write how) override {
    const Tensor tensor = parameter(p);
    if (how == Write::initialise) return nn::init::constant(tensor, 0.5);
    if (how == Write::element) {
      const Tensor first =
          tensor.alias(autograd::reshape(tensor, {tensor.numel()}).view().slice(0, 0, 1));
      kernels::fill(first, 0.75);
    } else if (how == Write::clamp) {
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

  Numbers statistics() const override {
    Numbers all;
    for (const auto* part : {&net_->a(), &net_->b()}) {
      append(all, part->norm().running_mean());
      append(all, part->norm().running_var());
    }
    return all;
  }

  Numbers cloned_weights() const override {
    Numbers all;
    for (const NamedTensor& parameter : net_->clone()->parameters())
      append(all, kernels::master_value(parameter.tensor));
    return all;
  }

 private:
  void build_ddp() {
    if (!setup_.ddp) return;
    const auto add = [&](nn::Module& module) {
      ddps_.push_back(
          std::make_unique<parallel::DistributedDataParallel>(module, ddp_group(), ddp_options()));
    };
    if (!setup_.wiring.two_ddps) return add(*net_);
    add(net_->a());
    add(net_->b());
  }

  Tensor parameter(int p) const override {
    return net_->parameters()[static_cast<std::size_t>(p)].tensor;
  }
  core::Stateful& model() override { return *net_; }
  std::vector<parallel::DistributedDataParallel*> ddps() const override {
    std::vector<parallel::DistributedDataParallel*> all;
    for (const auto& ddp : ddps_) all.push_back(ddp.get());
    return all;
  }
  const amp::Amp* handle() const override { return amp_ ? &*amp_ : nullptr; }
  void start_amp(const std::vector<optim::Optimizer*>& optimizers,
                 const amp::Options& options) override {
    amp_ = amp::initialize({net_.get()}, optimizers, options);
  }
  optim::StepResult step_amp(optim::Optimizer* optimizer,
                             const optim::StepOptions& options) override {
    return optimizer == nullptr ? amp_->step(options) : amp_->step(*optimizer, options);
  }

  Tensor loss_of(const Loss& loss) {
    const Loss own = own_loss(loss);
    net_->set_loss(&own);
    const DType dtype = amp_ ? DType::f32 : parameter(0).dtype();
    const Tensor input = Tensor::from(input_of(loss), {kCoefficients}, dtype);
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

  void backward_of(const Loss& loss, double weight, unsigned optimizers) override {
    const Tensor value = loss_of(loss);
    if (amp_ && loss.by_amp && loss.apart) {
      const amp::ScaledLoss scaled =
          amp_->scale_loss(value, loss_options(loss, weight, optimizers));
      look();
      cloned_weights();
      amp_->state_dict();
      return scaled.backward();
    }
    const bool by_amp = amp_ && loss.by_amp;
    const Tensor weighed = by_amp || weight == 1.0 ? value : autograd::affine(value, weight, 0.0);
    for (int left = loss.twice ? 1 : 0; left >= 0; --left) {
      const bool retain_graph = left > 0;
      if (by_amp) {
        amp::LossOptions options = loss_options(loss, weight, optimizers);
        options.retain_graph = retain_graph;
        amp_->backward(value, options);
      } else {
        autograd::backward(weighed, {}, {.retain_graph = retain_graph});
      }
    }
  }

  void scale_two_of(const Loss& first, const Loss& second) override {
    const amp::ScaledLoss one = amp_->scale_loss(loss_of(first), loss_options(first, 1.0, 0));
    const amp::ScaledLoss two = amp_->scale_loss(loss_of(second), loss_options(second, 1.0, 0));
    one.backward();
    two.backward();
  }

  void backward_delayed_of(const Loss& loss) override {
    amp::LossOptions options = loss_options(loss, 1.0, 0);
    options.delay_unscale = true;
    amp_->backward(loss_of(loss), options);
  }

  std::unique_ptr<Net> net_ = std::make_unique<Net>();
  // None, one, or one a submodule.
  std::vector<std::unique_ptr<parallel::DistributedDataParallel>> ddps_;
  std::optional<amp::Amp> amp_;
};

}  // namespace

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

bool has_cairns_modules() {
  return true;
}

bool casts_without_amp() {
  return true;
}

}  // namespace cairn::stateful
