#include "cairn/checkpointing/recompute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string_view>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"

namespace cairn::checkpointing {
namespace {

using autograd::AutocastGuard;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Counts operations by phase.
class Counter : public autograd::OpObserver {
 public:
  Counter() : previous_(autograd::set_observer(this)) {}
  ~Counter() override { autograd::set_observer(previous_); }
  void begin(const autograd::OpEvent& event) override { ++begun[{event.name, event.phase}]; }
  void end(const autograd::OpEvent& event) override { ++ended[{event.name, event.phase}]; }
  int replays_of(const std::string& name) { return ended[{name, autograd::Phase::recompute}]; }

  std::map<std::pair<std::string, autograd::Phase>, int> begun, ended;

 private:
  autograd::OpObserver* previous_;
};

Tensor random(const Shape& shape, std::uint64_t seed, bool requires_grad = false) {
  Tensor x = test::normal_tensor(shape, seed);
  x.set_requires_grad(requires_grad);
  return x;
}

// A block with everything that a replay could get wrong: products, batch norm, dropout, a softmax
// that autocast widens.
struct Block {
  explicit Block(std::uint64_t seed)
      : w1(random({16, 8}, seed, true)),
        w2(random({8, 16}, seed + 1, true)),
        gamma(random({16}, seed + 2, true)),
        beta(random({16}, seed + 3, true)) {}

  Tensor operator()(const Tensor& x) const {
    Tensor h = autograd::linear(x, w1);
    h = autograd::batch_norm(h, gamma, beta, running_mean, running_var);
    h = autograd::dropout(autograd::gelu(h), 0.3);
    return autograd::linear(autograd::softmax(h), w2) + x;
  }
  std::vector<Tensor> parameters() const { return {w1, w2, gamma, beta}; }

  Tensor w1, w2, gamma, beta;
  Tensor running_mean = Tensor::zeros({16}), running_var = Tensor::full({16}, 1);
};

struct StepOutcome {
  std::vector<std::vector<double>>
      values;  // loss, input gradient, parameter gradients, running statistics
  std::uint64_t offset = 0;
  bool operator==(const StepOutcome&) const = default;
};

enum class How { plain, checkpointed, nested };

StepOutcome train(How how, bool autocast, DType half) {
  const Block a(10), b(20);
  const Tensor x = random({32, 8}, 1, true);
  manual_seed(5);
  StepOutcome outcome;
  const auto plain = [&](const Tensor& y) { return b(a(y)); };
  Tensor loss;
  {
    const AutocastGuard guard(autocast, half);
    Tensor y;
    if (how == How::plain) y = plain(x);
    if (how == How::checkpointed) {
      y = checkpoint([&](const Tensor& z) { return a(z); }, x);
      y = checkpoint([&](const Tensor& z) { return b(z); }, y);
    }
    if (how == How::nested) {
      y = checkpoint(
          [&](const Tensor& z) { return b(checkpoint([&](const Tensor& u) { return a(u); }, z)); },
          x);
    }
    loss = autograd::mean(y * y);
  }
  autograd::backward(loss);
  outcome.offset = Generator::current().offset();
  outcome.values = {loss.to_vector(), x.grad().to_vector()};
  for (const Block* block : {&a, &b}) {
    for (const Tensor& p : block->parameters()) outcome.values.push_back(p.grad().to_vector());
    outcome.values.push_back(block->running_mean.to_vector());
    outcome.values.push_back(block->running_var.to_vector());
  }
  return outcome;
}

// The dtypes that softmax ran in during replays.
class ReplayedSoftmax : public autograd::ScopedObserver {
 public:
  std::vector<DType> dtypes;

 private:
  void on_end(const autograd::OpEvent& event) override {
    const bool replayed = event.phase == autograd::Phase::recompute;
    if (replayed && std::string_view(event.name) == "softmax") dtypes.push_back(event.dtype);
  }
};

TEST(Recompute, ReplaysUnderTheCastPoliciesOfTheForward) {
  const Tensor x = random({4, 8}, 1, true);
  Tensor y;
  {
    const AutocastGuard autocast(true);
    const autograd::CastPolicyGuard policies({{"softmax", autograd::CastPolicy::half}});
    y = checkpoint([](const Tensor& z) { return autograd::relu(autograd::softmax(z)); }, x);
  }
  EXPECT_EQ(y.dtype(), DType::f16);  // the replay stops in relu, with all that the backward needs
  ReplayedSoftmax replayed;
  autograd::backward(autograd::sum(y));
  EXPECT_EQ(replayed.dtypes, std::vector{DType::f16});
  EXPECT_TRUE(x.grad().defined());
}

class ReplayPrecision : public ::testing::TestWithParam<int> {
 protected:
  bool autocast() const { return GetParam() > 0; }
  DType half() const { return GetParam() == 2 ? DType::bf16 : DType::f16; }
};

TEST_P(ReplayPrecision, GradientsAreTheSameBits) {
  const StepOutcome plain = train(How::plain, autocast(), half());
  const StepOutcome checkpointed = train(How::checkpointed, autocast(), half());
  EXPECT_EQ(plain.values, checkpointed.values);
  EXPECT_EQ(plain.offset, checkpointed.offset);
}

TEST_P(ReplayPrecision, NestedToo) {
  const StepOutcome plain = train(How::plain, autocast(), half());
  const StepOutcome nested = train(How::nested, autocast(), half());
  EXPECT_EQ(plain.offset, nested.offset);
  EXPECT_EQ(plain.values, nested.values);
}
// Its backward writes over the gates that the replay made.
TEST_P(ReplayPrecision, AnLstmToo) {
  const auto gradients = [&](bool replayed) {
    manual_seed(7);
    nn::LSTM lstm(8, 16, {.layers = 2, .bidirectional = true});
    const Tensor x = random({5, 3, 8}, 1, true);
    Tensor y;
    {
      const AutocastGuard guard(autocast(), half());
      y = replayed ? checkpoint([&](const Tensor& z) { return lstm(z); }, x) : lstm(x);
    }
    autograd::backward(autograd::sum(y * y));
    std::vector<std::vector<double>> values{x.grad().to_vector()};
    for (const auto& p : lstm.parameters()) values.push_back(p.tensor.grad().to_vector());
    return values;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}
INSTANTIATE_TEST_SUITE_P(All, ReplayPrecision, ::testing::Values(0, 1, 2), [](const auto& info) {
  return std::string(info.param == 0 ? "f32" : info.param == 1 ? "autocast_f16" : "autocast_bf16");
});

TEST(Recompute, ReplaysOnceAndStopsEarly) {
  const Tensor w1 = random({8, 8}, 1, true), w2 = random({8, 8}, 2, true);
  const Tensor x = random({4, 8}, 3);
  Counter counter;
  const Tensor y = checkpoint(
      [&](const Tensor& z) {
        return autograd::linear(autograd::tanh(autograd::linear(z, w1)), w2);
      },
      x);
  const Tensor loss = autograd::sum(y);
  EXPECT_EQ(counter.replays_of("linear"), 0);
  autograd::backward(loss);
  EXPECT_EQ(counter.replays_of("tanh"), 1);
  EXPECT_EQ(counter.replays_of("linear"), 1);  // the last one's result is not needed again
}

TEST(Recompute, TheReplayEndsBeforeTheLastProductIsComputed) {
  // Its result would stand beside its gradient, which is as large.
  const Tensor w = random({4096, 8}, 1, true), x = random({256, 8}, 2, true);
  const Tensor y = checkpoint([&](const Tensor& z) { return autograd::linear(z, w); }, x);
  const std::size_t result = y.nbytes();
  const Tensor loss = autograd::sum(y);
  const std::size_t before = core::memory_stats(core::default_device()).current_total;
  core::reset_peak_memory(core::default_device());
  autograd::backward(loss);
  const std::size_t above = core::memory_stats(core::default_device()).peak_total - before;
  EXPECT_GE(above, result);
  EXPECT_LT(above, result + result / 2);
}

TEST(Recompute, KeepsLessThanThePlainForward) {
  const Tensor w = random({64, 64}, 1, true);
  const Tensor x = random({256, 64}, 2);
  const auto layers = [&](const Tensor& z) {
    Tensor y = z;
    for (int i = 0; i < 8; ++i) y = autograd::tanh(autograd::linear(y, w));
    return y;
  };
  const auto live_after = [&](const std::function<Tensor()>& forward) {
    const std::size_t before = core::memory_stats(core::default_device()).current_total;
    const Tensor y = forward();
    return core::memory_stats(core::default_device()).current_total - before;
  };
  const std::size_t result = x.nbytes();
  EXPECT_GE(live_after([&] { return layers(x); }), 8 * result);
  EXPECT_EQ(live_after([&] { return checkpoint(layers, x); }), result);
  // Nested: the inner segment's input is not kept either.
  EXPECT_EQ(live_after([&] {
              return checkpoint([&](const Tensor& z) { return checkpoint(layers, layers(z)); }, x);
            }),
            result);
}

TEST(Recompute, FreesAllInTheBackward) {
  const Tensor w = random({64, 64}, 1, true);
  const Tensor x = random({256, 64}, 2, true);
  const std::size_t before = core::memory_stats(core::default_device()).current_total;
  {
    const Tensor y =
        checkpoint([&](const Tensor& z) { return autograd::tanh(autograd::linear(z, w)); }, x);
    autograd::backward(autograd::sum(y));
    for (Tensor t : {w, x}) t.clear_grad();
  }
  EXPECT_EQ(core::memory_stats(core::default_device()).current_total, before);
}

TEST(Recompute, HooksOfTiedWeightsFireOnce) {
  const Tensor w = random({8, 8}, 1, true);
  const Tensor x = random({4, 8}, 2);
  int fired = 0;
  const auto handle = autograd::on_gradient_ready(w, [&](const Tensor&) { ++fired; });
  const auto layer = [&](const Tensor& z) { return autograd::tanh(autograd::linear(z, w)); };
  const Tensor y = checkpoint(layer, checkpoint(layer, autograd::linear(x, w)));
  autograd::backward(autograd::sum(y));
  EXPECT_EQ(fired, 1);
}

TEST(Recompute, ManyInputsWithAndWithoutGradient) {
  const Tensor table = random({10, 4}, 1, true);
  const Tensor scale = random({4}, 2, true);
  const Tensor shift = random({4}, 3);
  const Tensor index = Tensor::from<std::int64_t>({1, 7, 1}, {3});
  const auto f = [&](const std::vector<Tensor>& in) {
    return autograd::exp(autograd::embedding(in[0], in[1]) * in[2] + in[3]);
  };
  const std::vector<Tensor> inputs = {table, index, scale, shift};
  autograd::backward(autograd::sum(f(inputs)));
  const auto table_grad = table.grad().to_vector(), scale_grad = scale.grad().to_vector();
  for (Tensor t : {table, scale}) t.clear_grad();
  autograd::backward(autograd::sum(checkpoint(f, inputs)));
  EXPECT_EQ(table.grad().to_vector(), table_grad);
  EXPECT_EQ(scale.grad().to_vector(), scale_grad);
  EXPECT_FALSE(shift.grad().defined());
}

TEST(Recompute, RetainGraphAllowsASecondBackward) {
  const Tensor w = random({8, 8}, 1, true);
  const Tensor x = random({4, 8}, 2);
  Counter counter;
  const Tensor loss = autograd::sum(
      checkpoint([&](const Tensor& z) { return autograd::tanh(autograd::linear(z, w)); }, x));
  autograd::backward(loss, {}, {.retain_graph = true});
  const auto once = w.grad().to_vector();
  autograd::backward(loss);
  const auto twice = w.grad().to_vector();
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], 2 * once[i]);
  EXPECT_EQ(counter.replays_of("linear"), 1);
}

// A graph that is retained keeps what was replayed, not what it took to replay it.
TEST(Recompute, AReplayedSegmentKeepsNeitherInputsNorFunction) {
  Tensor h = autograd::gelu(random({4, 8}, 1, true));
  auto captured = std::make_shared<int>(1);
  const std::weak_ptr<int> function = captured;
  const std::weak_ptr<core::Storage> input = h.storage();
  Segment tanh = [captured](const Tensor& z) { return autograd::tanh(z); };
  const Tensor loss = autograd::sum(autograd::tanh(checkpoint(tanh, h)));
  tanh = nullptr;
  captured.reset();
  h = Tensor();
  EXPECT_FALSE(function.expired());
  EXPECT_FALSE(input.expired());
  autograd::backward(loss, {}, {.retain_graph = true});
  EXPECT_TRUE(function.expired());
  EXPECT_TRUE(input.expired());
}

TEST(Recompute, NoGradRunsPlainly) {
  int runs = 0;
  const Tensor x = random({4}, 1, true);
  const autograd::NoGradGuard no_grad;
  const Tensor y = checkpoint(
      [&](const Tensor& z) {
        ++runs;
        return autograd::exp(z);
      },
      x);
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(y.requires_grad());
}

std::string error_of_replay(const Segment& function, const CheckpointOptions& options = {}) {
  const Tensor x = random({4, 8}, 1, true);
  const Tensor loss = autograd::sum(checkpoint(function, x, options));
  const std::string message = message_of<core::Error>([&] { autograd::backward(loss); });
  EXPECT_FALSE(autograd::recomputing());
  return message;
}

TEST(Recompute, AReplayThatDiffersIsNamedByOperation) {
  int runs = 0;
  Tensor w = random({4, 8}, 2);
  EXPECT_THAT(error_of_replay([&](const Tensor& z) {
                if (++runs == 2) w = random({1, 8}, 2);
                return autograd::exp(autograd::mul(autograd::exp(z), w));
              }),
              HasSubstr(core::str("[checkpoint] expected saved tensor 1 of the replay, by mul, as "
                                  "[4, 8] f32 on ",
                                  w.device(), " (first run), got [1, 8] f32 on ", w.device())));
  runs = 0;
  EXPECT_THAT(error_of_replay([&](const Tensor& z) {
                const Tensor y = autograd::exp(z);
                return autograd::exp(++runs == 1 ? autograd::tanh(y) : y);
              }),
              HasSubstr("expected operation 1 of the replay to be tanh (first run), got exp"));
  runs = 0;
  EXPECT_THAT(error_of_replay([&](const Tensor& z) {
                const Tensor y = autograd::exp(z);
                return ++runs == 1 ? autograd::exp(y) : y;
              }),
              HasSubstr("(the last by exp), got fewer"));
}

TEST(Recompute, OtherBitsAreFoundOnDemand) {
  int runs = 0;
  const auto differs = [&](const Tensor& z) {
    return autograd::exp(autograd::affine(z, ++runs == 1 ? 1.0 : 1.0 + 1e-6, 0.0));
  };
  EXPECT_EQ(error_of_replay(differs), "nothing thrown");
  runs = 0;
  EXPECT_THAT(error_of_replay(differs, {.check_bits = true}),
              AllOf(HasSubstr("by exp"), HasSubstr("with the bits of the first run")));
}

TEST(Recompute, AnInputWrittenInBetweenIsAnError) {
  const Tensor x = random({4}, 1);
  const Tensor w = random({4}, 2, true);
  const Tensor loss =
      autograd::sum(checkpoint([&](const Tensor& z) { return autograd::exp(z * w); }, x));
  x.storage()->bump_version();
  EXPECT_THAT(message_of<core::Error>([&] { autograd::backward(loss); }),
              AllOf(HasSubstr("[checkpoint]"), HasSubstr("written in place")));
}

TEST(Recompute, AnErrorInTheReplayRestoresTheThread) {
  const Tensor x = random({4}, 1, true);
  int runs = 0;
  const Tensor loss = autograd::sum(checkpoint(
      [&](const Tensor& z) {
        if (++runs == 2) core::fail<core::IoError>("segment", "broken");
        return autograd::exp(autograd::dropout(z, 0.5));
      },
      x));
  const std::uint64_t offset = Generator::current().offset();
  EXPECT_THAT(message_of<core::IoError>([&] { autograd::backward(loss); }), HasSubstr("broken"));
  EXPECT_EQ(Generator::current().offset(), offset);
  EXPECT_FALSE(autograd::recomputing());
  EXPECT_TRUE(autograd::grad_enabled());
}

TEST(Recompute, SequentialCutsIntoSegments) {
  nn::Sequential model;
  manual_seed(1);
  for (int i = 0; i < 7; ++i) model.add(nn::Linear(8, 8));
  const Tensor x = random({4, 8}, 3, true);
  const auto gradients = [&](const std::function<Tensor()>& forward) {
    model.clear_grad();
    autograd::backward(autograd::mean(forward()));
    std::vector<std::vector<double>> all;
    for (const auto& p : model.parameters()) all.push_back(p.tensor.grad().to_vector());
    return all;
  };
  const auto plain = gradients([&] { return model(x); });
  for (const int segments : {1, 2, 3, 7}) {
    Counter counter;
    EXPECT_EQ(gradients([&] { return checkpoint_sequential(model, segments, x); }), plain);
    // Of each segment but the last: all its modules, without the last one's product.
    const int length = 7 / segments;
    EXPECT_EQ(counter.replays_of("linear"), (segments - 1) * (length - 1)) << segments;
  }
  EXPECT_THROW(checkpoint_sequential(model, 0, x), core::InvalidArgument);
  EXPECT_THROW(checkpoint_sequential(model, 8, x), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::checkpointing
