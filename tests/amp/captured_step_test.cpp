// Captured steps have the bits of uncaptured ones; on the CPU, where nothing is captured, the same
// programs run.
#include "cairn/amp/captured_step.h"

#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <random>

#include "cairn/core/stream.h"
#include "cairn/optim/optim.h"
#include "support.h"
#include "support/search.h"
#if defined(CAIRN_SIMULATED_GPUS)
#include "gpu/sim/simulator.h"
#endif

namespace cairn::amp {
namespace {

using testing::HasSubstr;

std::uint64_t host_waits() {
  std::uint64_t all = 0;
#if defined(CAIRN_SIMULATED_GPUS)
  for (const auto& [name, count] : gpusim::counters().waits) all += count;
#endif
  return all;
}

std::uint64_t replays() {
#if defined(CAIRN_SIMULATED_GPUS)
  return gpusim::counters().calls["cudaGraphLaunch"];
#else
  return 0;
#endif
}

bool on_gpu() {
  return core::default_device().is_cuda();
}

/// Linear, batch norm, ReLU, dropout, linear.
nn::Sequential make_dropping_model() {
  manual_seed(1);
  return nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.25),
                        nn::Linear(16, 4));
}

struct Rule {
  const char* name;
  std::function<std::unique_ptr<optim::Optimizer>(const NamedTensors&)> make;
};

const std::vector<Rule>& rules() {
  using test::maker;
  static const std::vector<Rule> all{
      {"adam", maker<optim::FusedAdam>(optim::AdamOptions{.lr = 3e-3, .weight_decay = 0.1})},
      {"sgd",
       maker<optim::FusedSGD>(optim::SgdOptions{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1})},
      {"adagrad", maker<optim::FusedAdagrad>(optim::AdagradOptions{.lr_decay = 0.01})},
      {"lamb", maker<optim::FusedLAMB>(optim::LambOptions{.max_gradient_norm = 0.5})}};
  return all;
}

/// A batch, and what its loss is multiplied by: infinity makes it overflow, and nothing but the
/// loss.
struct Feed {
  Tensor x, labels, factor;
};

Feed feed_of(std::uint64_t seed, bool overflows = false, std::int64_t rows = 32) {
  const Batch batch = make_batch(seed);
  const double factor = overflows ? kInf : 1.0;
  return {batch.x.alias(batch.x.view().slice(0, 0, rows)),
          batch.labels.alias(batch.labels.view().slice(0, 0, rows)), Tensor::full({1}, factor)};
}

/// A training's own generator in place of the thread's: two take turns in one thread.
class Turn {
 public:
  explicit Turn(Generator& own) : own_(own) { std::swap(Generator::current(), own_); }
  ~Turn() { std::swap(Generator::current(), own_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Generator& own_;
};

/// One training: a model with what steps it.
struct Training {
  nn::Sequential model = make_dropping_model();
  std::unique_ptr<optim::Optimizer> optimizer;
  Amp precision;
  Generator random{7};

  Training(const Rule& rule, const Options& options)
      : optimizer(rule.make(model.parameters())),
        precision(initialize(model, *optimizer, options)) {}

  Tensor loss(const Tensor& x, const Tensor& labels, const Tensor& factor) {
    return autograd::mul(autograd::cross_entropy(model(x), labels), factor);
  }
  Tensor loss(const Feed& feed) { return loss(feed.x, feed.labels, feed.factor); }
  optim::StepResult eager(const Feed& feed) {
    const Turn turn(random);
    precision.backward(loss(feed));
    return precision.step();
  }
  void captured(CapturedStep& step, const Feed& feed) {
    const Turn turn(random);
    step(feed.x, feed.labels, feed.factor);
  }
  CapturedStep capture(const CapturedStepOptions& options = {}) {
    return {precision,
            [this](const Tensor& x, const Tensor& y, const Tensor& f) { return loss(x, y, f); },
            options};
  }
};

void expect_equal(Training& a, Training& b, const std::string& when) {
  EXPECT_EQ(everything(a.model, *a.optimizer), everything(b.model, *b.optimizer)) << when;
  EXPECT_EQ(a.optimizer->steps(), b.optimizer->steps()) << when;
  EXPECT_EQ(test::flat(a.precision.scaler().state_dict()),
            test::flat(b.precision.scaler().state_dict()))
      << when;
  EXPECT_EQ(a.random.offset(), b.random.offset()) << when;
}

/// A training, and the same in captured steps.
struct Twins {
  Twins(const Rule& rule, const Options& options) : plain(rule, options), graph(rule, options) {}
  void train(const Feed& feed) {
    (void)plain.eager(feed);
    graph.captured(step, feed);
  }
  template <class F>
  void each(const F& f) {
    f(plain), f(graph);
  }
  void expect_same(const std::string& when) { expect_equal(plain, graph, when); }

  Training plain, graph;
  CapturedStep step = graph.capture();
};

struct Case {
  OptLevel level;
  DType half;
  std::size_t rule;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return core::str(name(info.param.level), "_", info.param.half, "_",
                   rules()[info.param.rule].name);
}
/// Every level, and every rule at O2 in f16.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const OptLevel level : kLevels) {
    for (const DType half : kHalves) all.push_back({level, half, all.size() % rules().size()});
  }
  for (const std::size_t rule : {1, 2, 3}) all.push_back({OptLevel::O2, DType::f16, rule});
  return all;
}

class CapturedSteps : public testing::TestWithParam<Case> {};

TEST_P(CapturedSteps, HaveTheBitsOfUncapturedOnesOverFiftyStepsWithSkips) {
  const auto [level, half, rule] = GetParam();
  Twins twins(rules()[rule],
              {.opt_level = level,
               .half_dtype = half,
               .dynamic_loss_scale = true,
               .scaler = {.init_scale = 1024, .growth_interval = 4, .hysteresis = 2}});
  int skipped = 0;
  for (std::uint64_t k = 0; k < 50; ++k) {
    const Feed feed = feed_of(k, k % 7 == 3 || k % 11 == 4 || (k >= 20 && k < 24));
    const double rate = 1e-2 / static_cast<double>(1 + k / 10);
    twins.each([&](Training& one) { one.optimizer->set_lr(rate); });
    skipped += twins.plain.eager(feed).applied ? 0 : 1;
    const std::int64_t reads = kernels::host_reads();
    const std::uint64_t waits = host_waits();
    const bool replays = twins.step.captured();
    twins.graph.captured(twins.step, feed);
    if (replays) {
      EXPECT_EQ(kernels::host_reads(), reads);
      EXPECT_EQ(host_waits(), waits);
    }
    if (k % 10 == 9) twins.expect_same(core::str("after step ", k));
  }
  EXPECT_EQ(twins.step.captured(), on_gpu());
  EXPECT_GE(skipped, 10);
  const optim::StepResult said = twins.graph.precision.report();
  EXPECT_FALSE(said.applied);
  EXPECT_THAT(said.reason, HasSubstr(core::str(skipped, " of 50 steps skipped: inf or NaN in the ",
                                               "gradient of ", said.culprit)));
  EXPECT_TRUE(twins.graph.precision.report().applied);
}

INSTANTIATE_TEST_SUITE_P(All, CapturedSteps, testing::ValuesIn(cases()), case_name);

const Options kDynamic{.opt_level = OptLevel::O2,
                       .half_dtype = DType::f16,
                       .scaler = {.init_scale = 1024, .growth_interval = 3}};

TEST(CapturedStep, TellsTheLossOfTheLastStep) {
  Twins twins(rules()[1], kDynamic);
  EXPECT_THROW(twins.step.loss(), core::InvalidArgument);
  std::vector<Tensor> losses;
  for (std::uint64_t k = 0; k < 6; ++k) {
    twins.graph.captured(twins.step, feed_of(k));
    losses.push_back(twins.step.loss());
  }
  for (std::uint64_t k = 0; k < 6; ++k) {
    const Turn turn(twins.plain.random);
    const Tensor loss = twins.plain.loss(feed_of(k));
    twins.plain.precision.backward(loss);
    test::expect_applied(twins.plain.precision.step());
    EXPECT_EQ(losses[k].item(), loss.item()) << k;
  }
}

// A step's inputs are written where the last replay, of another stream, may still read.
TEST(CapturedStep, HasTheSameBitsOnStreamsThatTakeTurns) {
  Twins twins(rules()[0], kDynamic);
  std::vector<Feed> feeds;
  for (std::uint64_t k = 0; k < 16; ++k) feeds.push_back(feed_of(k));
  for (const Feed& feed : feeds) (void)twins.plain.eager(feed);
  for (std::size_t k = 0; k < 6; ++k) twins.graph.captured(twins.step, feeds[k]);
  const Device device = core::default_device();
  core::Stream::current(device).synchronize();
  const core::Stream streams[] = {core::Stream::create(device), core::Stream::create(device)};
  for (std::size_t k = 6; k < feeds.size(); ++k) {
    const core::StreamGuard guard(streams[k % 2]);
    twins.graph.captured(twins.step, feeds[k]);
    if (!twins.step.captured()) streams[k % 2].synchronize();
  }
  for (const core::Stream& stream : streams) stream.synchronize();
  twins.expect_same("after steps on two streams");
  EXPECT_EQ(twins.step.captured(), on_gpu());
}

TEST(CapturedStep, ClipsAndAccumulatesAsUncapturedOnes) {
  Options options = kDynamic;
  options.max_gradient_norm = 0.05;
  Training plain(rules()[0], options), graph(rules()[0], options);
  CapturedStep step(graph.precision,
                    [&](const CapturedStep::Inputs& x) {
                      graph.precision.backward(graph.loss(x[0], x[1], x[2]), {.weight = 0.5});
                      return autograd::affine(graph.loss(x[0], x[1], x[2]), 0.5, 0.0);
                    },
                    {.step = {.gradient_scale = 0.5}});
  for (std::uint64_t k = 0; k < 8; ++k) {
    const Feed feed = feed_of(k);
    {
      const Turn turn(plain.random);
      plain.precision.backward(plain.loss(feed), {.weight = 0.5});
      plain.precision.backward(autograd::affine(plain.loss(feed), 0.5, 0.0));
      EXPECT_LT(plain.precision.step({.gradient_scale = 0.5}).clip_coefficient, 1.0);
    }
    graph.captured(step, feed);
  }
  expect_equal(plain, graph, "after clipped steps of two backwards");
}

/// Steps, a change to both models, and steps: the change is seen, and recorded.
template <class Change>
void check_change(const char* what, const Change& change) {
  Twins twins(rules()[0], kDynamic);
  const auto train = [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t k = from; k < to; ++k) {
      const Feed feed = feed_of(k);
      twins.train(feed);
    }
  };
  train(0, 6);
  EXPECT_EQ(twins.step.captured(), on_gpu());
  twins.each([&](Training& one) { change(one); });
  train(6, 7);
  twins.expect_same(core::str("a step after ", what));
  EXPECT_FALSE(twins.step.captured()) << what;
  train(7, 12);
  EXPECT_EQ(twins.step.captured(), on_gpu());
  twins.expect_same(core::str("steps after ", what));
}

TEST(CapturedStep, IsRecordedAnewAfterTrainAndEval) {
  check_change("eval()", [](Training& one) { one.model.eval(); });
  check_change("eval() of a layer", [](Training& one) {
    for (const auto& [name, module] : one.model.modules()) {
      if (name == "3") module->eval();  // dropout
    }
  });
}

TEST(CapturedStep, IsRecordedAnewAfterAParameterIsFrozen) {
  check_change("a frozen bias", [](Training& one) {
    for (const auto& [name, tensor] : one.model.parameters()) {
      if (name == "0.bias") Tensor(tensor).set_requires_grad(false);
    }
  });
}

// Random orders of what a trainer does between steps.
TEST(CapturedStep, IsFoundEqualInRandomOrders) {
  const std::uint64_t replays_before = replays();
  const std::vector<std::uint64_t> seeds = test::search_seeds(6);
  for (const std::uint64_t seed : seeds) {
    std::mt19937 random(static_cast<unsigned>(seed));
    Twins twins(rules()[seed % rules().size()], kDynamic);
    std::uint64_t k = 0;
    bool overflows = false;
    const auto set_rate = [&] {
      const double rate = 1e-3 * (1 + random() % 8);
      twins.each([&](Training& one) { one.optimizer->set_lr(rate); });
    };
    const auto step_uncaptured = [&] {
      twins.each([&](Training& one) { (void)one.eager(feed_of(k, overflows)); });
    };
    const auto load = [&] {  // a state that one takes over from the other
      const StateDict optimizer = twins.graph.optimizer->state_dict();
      const StateDict amp = twins.graph.precision.state_dict();
      twins.each([&](Training& one) {
        one.optimizer->load_state_dict(optimizer);
        one.precision.load_state_dict(amp);
      });
    };
    const auto set_mode = [&] {
      const bool trains = random() % 2 == 0;
      twins.each([&](Training& one) { one.model.train(trains); });
    };
    const auto write = [&] {  // by somebody else
      twins.each([&](Training& one) {
        const Tensor weight = one.model.parameters().front().tensor;
        kernels::affine(weight, 0.5, 0.0, weight);
      });
    };
    const auto begin_again = [&] {  // everything on the device is made anew
      twins.graph.precision.set_capturable(false);
      twins.graph.precision.set_capturable(true);
    };
    const auto set_decay = [&] {
      const double decay = 0.01 * (random() % 3);
      twins.each([&](Training& one) { one.optimizer->groups()[0].weight_decay = decay; });
    };
    const std::vector<std::pair<const char*, std::function<void()>>> commands = {
        {"rate", set_rate},
        {"uncaptured", step_uncaptured},
        {"small", [&] { twins.train(feed_of(k, overflows, 5)); }},
        {"load", load},
        {"mode", set_mode},
        {"write", write},
        {"again", begin_again},
        {"decay", set_decay}};
    std::string did;
    for (; k < 40; ++k) {
      overflows = random() % 5 == 0;
      const std::size_t command = random() % 18;
      if (command < commands.size()) {
        did += core::str(" ", commands[command].first);
        commands[command].second();
      } else {
        did += " step";
        twins.train(feed_of(k, overflows));
      }
      if (k % 5 == 4) twins.expect_same(core::str("seed ", seed, ":", did));
      if (testing::Test::HasFailure()) return;
    }
  }
  if (on_gpu() && replays() > 0) {  // else they are not counted
    EXPECT_GT(replays(), replays_before + 5 * seeds.size());
  }
}

TEST(CapturedStep, ErrorsSayWhatCannotBeCaptured) {
  Training one(rules()[0], kDynamic), several(rules()[0], with_losses(2, kDynamic));
  EXPECT_THAT(message_of<core::Unsupported>([&] { (void)several.capture(); }),
              HasSubstr("got 2 losses with scales of their own"));
  Training novograd({"novograd", test::maker<optim::FusedNovoGrad>(optim::NovoGradOptions{})},
                    kDynamic);
  EXPECT_THAT(message_of<core::Unsupported>([&] { (void)novograd.capture(); }),
              HasSubstr("got FusedNovoGrad"));
  EXPECT_THROW((void)one.capture({.warm_up = 0}), core::InvalidArgument);
  CapturedStep step = one.capture({.step = {.error_if_nonfinite = true}});
  EXPECT_THROW(one.captured(step, feed_of(1)), core::Unsupported);
}

TEST(CapturedStep, AStepThatNeedsTheHostIsRefusedAndChangesNothing) {
  if (!on_gpu()) GTEST_SKIP() << "nothing is captured on the CPU";
  Training plain(rules()[0], kDynamic), graph(rules()[0], kDynamic);
  bool reads = true;
  CapturedStep step(graph.precision, [&](const CapturedStep::Inputs& x) {
    const Tensor loss = graph.loss(x[0], x[1], x[2]);
    if (reads) loss.item();
    return loss;
  });
  const auto train = [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t k = from; k < to; ++k) {
      (void)plain.eager(feed_of(k));
      graph.captured(step, feed_of(k));
    }
  };
  train(0, 2);
  const Generator before = graph.random;
  EXPECT_THROW(graph.captured(step, feed_of(2)), core::Unsupported);
  EXPECT_EQ(graph.random.offset(), before.offset());
  expect_equal(plain, graph, "after a capture that failed");
  reads = false;
  train(2, 6);
  EXPECT_TRUE(step.captured());
  expect_equal(plain, graph, "after a capture that did not");
}

TEST(CapturedStep, CollapsesWhenAsked) {
  Options options = kDynamic;
  options.scaler = {.init_scale = 2};
  options.collapse_after = 5;
  Training one(rules()[0], options);
  CapturedStep step = one.capture();
  for (std::uint64_t k = 0; k < 5; ++k) one.captured(step, feed_of(k, true));
  EXPECT_EQ(one.precision.loss_scale(), 1.0);
  EXPECT_FALSE(one.precision.report().applied);
  for (std::uint64_t k = 0; k < 2; ++k) one.captured(step, feed_of(k, true));
  EXPECT_THROW(one.precision.report(), LossScaleCollapse);
}

TEST(Capturable, HandlesGoBackAndForth) {
  Training plain(rules()[0], kDynamic), other(rules()[0], kDynamic);
  for (std::uint64_t k = 0; k < 16; ++k) {
    if (k % 4 == 0) other.precision.set_capturable(k % 8 == 0);
    const Feed feed = feed_of(k, k % 3 == 2);
    const bool applied = plain.eager(feed).applied;
    const optim::StepResult result = other.eager(feed);
    EXPECT_EQ(result.known, k % 8 >= 4);
    EXPECT_TRUE(!result.known || result.applied == applied);
  }
  expect_equal(plain, other, "after 16 steps");
}

}  // namespace
}  // namespace cairn::amp
