// Captured steps have the bits of uncaptured ones; on the CPU, where nothing is captured, the same
// programs run.
#include "cairn/amp/captured_step.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <random>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/optim/optim.h"
#include "support.h"
#include "support/message_of.h"
#include "support/step.h"
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
  const auto calls = gpusim::counters().calls;
  const auto found = calls.find("cudaGraphLaunch");
  return found == calls.end() ? 0 : found->second;
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

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const NamedTensors&)>;

struct Rule {
  const char* name;
  MakeOptimizer make;
};

template <class Optimizer, class Options>
MakeOptimizer maker(const Options& options) {
  return [=](const NamedTensors& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

const std::vector<Rule>& rules() {
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
  const double factor = overflows ? std::numeric_limits<double>::infinity() : 1.0;
  return {batch.x.alias(batch.x.view().slice(0, 0, rows)),
          batch.labels.alias(batch.labels.view().slice(0, 0, rows)), Tensor::full({1}, factor)};
}

/// One training: a model with what steps it.
struct Training {
  nn::Sequential model = make_dropping_model();
  std::unique_ptr<optim::Optimizer> optimizer;
  Amp precision;
  Generator random{7};  // its own: two trainings take turns in one thread

  Training(const Rule& rule, const Options& options)
      : optimizer(rule.make(model.parameters())),
        precision(initialize(model, *optimizer, options)) {}

  Tensor loss(const Tensor& x, const Tensor& labels, const Tensor& factor) {
    return autograd::mul(autograd::cross_entropy(model(x), labels), factor);
  }
  Tensor loss(const Feed& feed) { return loss(feed.x, feed.labels, feed.factor); }
  optim::StepResult eager(const Feed& feed) {
    std::swap(Generator::current(), random);
    precision.backward(loss(feed));
    const optim::StepResult result = precision.step();
    std::swap(Generator::current(), random);
    return result;
  }
  void captured(CapturedStep& step, const Feed& feed) {
    std::swap(Generator::current(), random);
    step(feed.x, feed.labels, feed.factor);
    std::swap(Generator::current(), random);
  }
  CapturedStep capture(const CapturedStepOptions& options = {}) {
    return {precision,
            [this](const Tensor& x, const Tensor& y, const Tensor& f) { return loss(x, y, f); },
            options};
  }
};

void expect_same(Training& a, Training& b, const std::string& when) {
  EXPECT_EQ(everything(a.model, *a.optimizer), everything(b.model, *b.optimizer)) << when;
  EXPECT_EQ(a.optimizer->steps(), b.optimizer->steps()) << when;
  EXPECT_EQ(a.precision.loss_scale(), b.precision.loss_scale()) << when;
  const StateDict state = a.precision.scaler().state_dict(),
                  other = b.precision.scaler().state_dict();
  EXPECT_EQ(state.integer("unskipped"), other.integer("unskipped")) << when;
  if (state.contains("overflows_left")) {
    EXPECT_EQ(state.integer("overflows_left"), other.integer("overflows_left")) << when;
  }
  EXPECT_EQ(a.random.offset(), b.random.offset()) << when;
}

struct Case {
  OptLevel level;
  DType half;
  std::size_t rule;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return core::str(name(info.param.level), "_", info.param.half, "_",
                   rules()[info.param.rule].name);
}
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const OptLevel level : kLevels) {
    for (const DType half : kHalves) all.push_back({level, half, all.size() % rules().size()});
  }
  for (std::size_t rule = 0; rule < rules().size(); ++rule) {
    all.push_back({OptLevel::O2, DType::f16, rule});
  }
  std::vector<Case> unique;
  for (const Case& one : all) {
    const bool twice = std::any_of(unique.begin(), unique.end(), [&](const Case& other) {
      return case_name({one, 0}) == case_name({other, 0});
    });
    if (!twice) unique.push_back(one);
  }
  return unique;
}

class CapturedSteps : public testing::TestWithParam<Case> {
 protected:
  Options options() const {
    return {.opt_level = GetParam().level,
            .half_dtype = GetParam().half,
            .dynamic_loss_scale = true,
            .scaler = {.init_scale = 1024, .growth_interval = 4, .hysteresis = 2}};
  }
  const Rule& rule() const { return rules()[GetParam().rule]; }
};

TEST_P(CapturedSteps, HaveTheBitsOfUncapturedOnesOverFiftyStepsWithSkips) {
  Training plain(rule(), options()), graph(rule(), options());
  CapturedStep step = graph.capture();
  int skipped = 0;
  for (std::uint64_t k = 0; k < 50; ++k) {
    const Feed feed = feed_of(k, k % 7 == 3 || k % 11 == 4 || (k >= 20 && k < 24));
    const double rate = 1e-2 / static_cast<double>(1 + k / 10);
    for (Training* one : {&plain, &graph}) one->optimizer->set_lr(rate);
    const optim::StepResult result = plain.eager(feed);
    skipped += result.applied ? 0 : 1;
    const std::int64_t reads = kernels::host_reads();
    const std::uint64_t waits = host_waits();
    const bool replays = step.captured();
    graph.captured(step, feed);
    if (replays) {
      EXPECT_EQ(kernels::host_reads(), reads);
      EXPECT_EQ(host_waits(), waits);
    }
    if (k % 10 == 9) expect_same(plain, graph, core::str("after step ", k));
  }
  EXPECT_EQ(step.captured(), on_gpu());
  EXPECT_GE(skipped, 10);
  const optim::StepResult said = graph.precision.report();
  EXPECT_FALSE(said.applied);
  EXPECT_THAT(said.reason, HasSubstr(core::str(skipped, " of 50 steps skipped: inf or NaN in the ",
                                               "gradient of ", said.culprit)));
  EXPECT_TRUE(graph.precision.report().applied);
}

INSTANTIATE_TEST_SUITE_P(All, CapturedSteps, testing::ValuesIn(cases()), case_name);

const Options kDynamic{.opt_level = OptLevel::O2,
                       .half_dtype = DType::f16,
                       .scaler = {.init_scale = 1024, .growth_interval = 3}};

TEST(CapturedStep, LeavesOtherShapesUncaptured) {
  Training plain(rules()[0], kDynamic), graph(rules()[0], kDynamic);
  CapturedStep step = graph.capture();
  for (std::uint64_t k = 0; k < 12; ++k) {
    const Feed feed = feed_of(k, false, k % 4 == 3 ? 7 : 32);
    (void)plain.eager(feed);
    graph.captured(step, feed);
  }
  expect_same(plain, graph, "after parts of batches");
  EXPECT_EQ(step.captured(), on_gpu());
}

TEST(CapturedStep, TellsTheLossOfTheLastStep) {
  Training plain(rules()[1], kDynamic), graph(rules()[1], kDynamic);
  CapturedStep step = graph.capture();
  EXPECT_THROW(step.loss(), core::InvalidArgument);
  std::vector<Tensor> losses;
  for (std::uint64_t k = 0; k < 6; ++k) {
    graph.captured(step, feed_of(k));
    losses.push_back(step.loss());
  }
  for (std::uint64_t k = 0; k < 6; ++k) {
    std::swap(Generator::current(), plain.random);
    const Tensor loss = plain.loss(feed_of(k));
    plain.precision.backward(loss);
    test::expect_applied(plain.precision.step());
    std::swap(Generator::current(), plain.random);
    EXPECT_EQ(losses[k].item(), loss.item()) << k;
  }
}

// A step's inputs are written where the last replay, of another stream, may still read.
TEST(CapturedStep, HasTheSameBitsOnStreamsThatTakeTurns) {
  Training plain(rules()[0], kDynamic), graph(rules()[0], kDynamic);
  CapturedStep step = graph.capture();
  std::vector<Feed> feeds;
  for (std::uint64_t k = 0; k < 16; ++k) feeds.push_back(feed_of(k));
  for (const Feed& feed : feeds) (void)plain.eager(feed);
  for (std::size_t k = 0; k < 6; ++k) graph.captured(step, feeds[k]);
  const Device device = core::default_device();
  core::Stream::current(device).synchronize();
  const core::Stream streams[] = {core::Stream::create(device), core::Stream::create(device)};
  for (std::size_t k = 6; k < feeds.size(); ++k) {
    const core::StreamGuard guard(streams[k % 2]);
    graph.captured(step, feeds[k]);
    if (!step.captured()) streams[k % 2].synchronize();
  }
  for (const core::Stream& stream : streams) stream.synchronize();
  expect_same(plain, graph, "after steps on two streams");
  EXPECT_EQ(step.captured(), on_gpu());
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
    std::swap(Generator::current(), plain.random);
    plain.precision.backward(plain.loss(feed), {.weight = 0.5});
    plain.precision.backward(autograd::affine(plain.loss(feed), 0.5, 0.0));
    const optim::StepResult result = plain.precision.step({.gradient_scale = 0.5});
    EXPECT_LT(result.clip_coefficient, 1.0);
    std::swap(Generator::current(), plain.random);
    graph.captured(step, feed);
  }
  expect_same(plain, graph, "after clipped steps of two backwards");
}

// Random orders of what a trainer does between steps.
TEST(CapturedStep, IsFoundEqualInRandomOrders) {
  const std::uint64_t replays_before = replays();
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const Rule& rule = rules()[seed % rules().size()];
    Training plain(rule, kDynamic), graph(rule, kDynamic);
    CapturedStep step = graph.capture();
    std::vector<StateDict> saved;
    std::string did;
    const auto both = [&](const auto& f) { f(plain), f(graph); };
    for (std::uint64_t k = 0; k < 40; ++k) {
      const bool overflows = random() % 5 == 0;
      const Feed feed = feed_of(k, overflows);
      switch (random() % 18) {
        case 0: {
          const double rate = 1e-3 * (1 + random() % 8);
          both([&](Training& one) { one.optimizer->set_lr(rate); });
          did += " lr";
          break;
        }
        case 1:  // an uncaptured step
          (void)plain.eager(feed), (void)graph.eager(feed);
          did += " eager";
          break;
        case 2: {
          const Feed small = feed_of(k, overflows, 5);
          (void)plain.eager(small), graph.captured(step, small);
          did += " small";
          break;
        }
        case 3: {  // a state taken over by the other one
          const StateDict optimizer = graph.optimizer->state_dict();
          const StateDict amp = graph.precision.state_dict();
          both([&](Training& one) {
            one.optimizer->load_state_dict(optimizer);
            one.precision.load_state_dict(amp);
          });
          did += " load";
          break;
        }
        case 4: {
          const bool trains = random() % 2 == 0;
          both([&](Training& one) { one.model.train(trains); });
          did += trains ? " train" : " eval";
          break;
        }
        case 5: {  // written by somebody else
          both([&](Training& one) {
            const Tensor weight = one.model.parameters().front().tensor;
            kernels::affine(weight, 0.5, 0.0, weight);
          });
          did += " write";
          break;
        }
        case 7:  // everything on the device is made anew
          graph.precision.set_capturable(false);
          graph.precision.set_capturable(true);
          did += " again";
          break;
        case 6: {
          const double decay = 0.01 * (random() % 3);
          both([&](Training& one) { one.optimizer->groups()[0].weight_decay = decay; });
          did += " decay";
          break;
        }
        default:
          (void)plain.eager(feed), graph.captured(step, feed);
          did += " step";
      }
      if (k % 5 == 4) expect_same(plain, graph, core::str("seed ", seed, ":", did));
      if (testing::Test::HasFailure()) return;
    }
  }
  if (on_gpu() && replays() > 0) {  // else they are not counted
    EXPECT_GT(replays(), replays_before + 30);
  }
}

TEST(CapturedStep, ErrorsSayWhatCannotBeCaptured) {
  Training one(rules()[0], kDynamic);
  Options two_losses = kDynamic;
  two_losses.num_losses = 2;
  Training several(rules()[0], two_losses);
  EXPECT_THAT(test::message_of<core::Unsupported>([&] { several.capture(); }),
              HasSubstr("got 2 losses with scales of their own"));
  Training novograd({"novograd", maker<optim::FusedNovoGrad>(optim::NovoGradOptions{})}, kDynamic);
  EXPECT_THAT(test::message_of<core::Unsupported>([&] { novograd.capture(); }),
              HasSubstr("got FusedNovoGrad"));
  EXPECT_THROW(one.capture({.warm_up = 0}), core::InvalidArgument);
  CapturedStep step = one.capture({.step = {.error_if_nonfinite = true}});
  EXPECT_THROW(step(make_batch(1).x, make_batch(1).labels, Tensor::full({1}, 1.0)),
               core::Unsupported);
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
  for (std::uint64_t k = 0; k < 2; ++k) {
    (void)plain.eager(feed_of(k));
    graph.captured(step, feed_of(k));
  }
  const Generator before = graph.random;
  EXPECT_THROW(graph.captured(step, feed_of(2)), core::Unsupported);
  std::swap(Generator::current(), graph.random);  // the exception has left them swapped
  EXPECT_EQ(graph.random.offset(), before.offset());
  expect_same(plain, graph, "after a capture that failed");
  reads = false;
  for (std::uint64_t k = 2; k < 6; ++k) {
    (void)plain.eager(feed_of(k));
    graph.captured(step, feed_of(k));
  }
  EXPECT_TRUE(step.captured());
  expect_same(plain, graph, "after a capture that did not");
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
  expect_same(plain, other, "after 16 steps");
}

}  // namespace
}  // namespace cairn::amp
