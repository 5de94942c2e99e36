// Apex's test_basic_casts, test_promotion and test_rnn: which dtype comes out of which operation in
// an O1 region, and that gradients come back in the input's. Its in-place cases (exp_, add_) have
// no counterpart: Cairn has no in-place operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"

namespace cairn {
namespace {

using namespace autograd;  // NOLINT: every operation by its name

constexpr std::int64_t kBatch = 16, kHidden = 64, kChannels = 16, kKernel = 3, kTime = 10;

enum class Result { half, f32, match };
using Function = std::function<Tensor(const Tensor&)>;

Tensor random(const Shape& shape, DType dtype = DType::f32) {
  const Tensor x = Tensor::empty(shape);
  nn::init::uniform(x, 0.1, 0.9);
  return to(x, dtype).detach();
}

class Casts : public ::testing::TestWithParam<DType> {
 protected:
  Casts() { manual_seed(12); }

  DType expected(Result result, DType input) const {
    if (result == Result::match) return input;
    return result == Result::half ? GetParam() : DType::f32;
  }

  // f in a region of GetParam(), for half and f32 inputs, with its gradient.
  void check(const Function& f, Result result, const Shape& shape) const {
    for (const DType input : {GetParam(), DType::f32}) {
      const Tensor x = random(shape, input).set_requires_grad(true);
      Tensor loss;
      {
        const AutocastGuard autocast(true, GetParam());
        const Tensor y = f(x);
        EXPECT_EQ(y.dtype(), expected(result, input)) << "from " << input;
        loss = sum(y);
      }
      backward(loss);
      EXPECT_EQ(x.grad().dtype(), input);
    }
  }
};

TEST_P(Casts, LinearIsHalf) {
  nn::Linear linear(kHidden, kHidden);
  check([&](const Tensor& x) { return linear(x); }, Result::half, {kBatch, kHidden});
  check([&](const Tensor& x) { return autograd::linear(x, linear.weight(), linear.bias()); },
        Result::half, {kBatch, kHidden});
}

TEST_P(Casts, Conv2dIsHalf) {
  nn::Conv2d conv(kChannels, kChannels, kKernel);
  check([&](const Tensor& x) { return conv(x); }, Result::half,
        {kBatch, kChannels, kKernel, kKernel});
}

TEST_P(Casts, SoftmaxIsF32) {
  check([](const Tensor& x) { return softmax(x); }, Result::f32, {kBatch, kHidden});
}

TEST_P(Casts, GroupNormIsF32) {
  check([](const Tensor& x) { return group_norm(x, 4, {}, {}); }, Result::f32,
        {kBatch, kChannels, kKernel, kKernel});
}

TEST_P(Casts, MseLossIsF32) {
  for (const DType dtype : {GetParam(), DType::f32}) {
    const Tensor target = random({kBatch, kHidden}, dtype);
    check([&](const Tensor& x) { return mse_loss(x, target); }, Result::f32, {kBatch, kHidden});
  }
}

TEST_P(Casts, PowIsF32) {
  check([](const Tensor& x) { return pow(x, 2.0); }, Result::f32, {kBatch, kHidden});
  const Tensor exponent = random({kBatch, kHidden}, GetParam());
  check([&](const Tensor& x) { return pow(x, exponent); }, Result::f32, {kBatch, kHidden});
}

TEST_P(Casts, SumIsF32) {
  check([](const Tensor& x) { return sum(x); }, Result::f32, {kBatch, kHidden});
}

TEST_P(Casts, ACopyToAnotherDeviceMatches) {  // Apex: .cpu() gives f32
  check([](const Tensor& x) { return to(x, x.device()); }, Result::match, {kBatch, kHidden});
}

TEST_P(Casts, ReluMatches) {
  check([](const Tensor& x) { return relu(x); }, Result::match, {kBatch, kHidden});
}

TEST_P(Casts, BatchNormMatches) {
  nn::BatchNorm2d norm(kChannels);
  for (const bool training : {true, false}) {
    norm.train(training);
    check([&](const Tensor& x) { return norm(x); }, Result::match,
          {kBatch, kChannels, kKernel, kKernel});
  }
}

TEST_P(Casts, MatmulIsHalf) {
  for (const DType dtype : {GetParam(), DType::f32}) {
    const Tensor other = random({kHidden, kHidden}, dtype);
    check([&](const Tensor& x) { return matmul(x, other); }, Result::half, {kBatch, kHidden});
  }
}

TEST_P(Casts, BinaryCrossEntropyIsBanned) {
  const Tensor target = random({kBatch, kHidden}, GetParam());
  const AutocastGuard autocast(true, GetParam());
  EXPECT_THROW(binary_cross_entropy(random({kBatch, kHidden}, GetParam()), target),
               core::Unsupported);
}

TEST_P(Casts, BinaryCrossEntropyIsF32WhereTheBanIsLifted) {
  const CastPolicyGuard allowed({{"binary_cross_entropy", CastPolicy::f32}});
  const Tensor target = random({kBatch, kHidden}, GetParam());
  check([&](const Tensor& x) { return binary_cross_entropy(x, target); }, Result::f32,
        {kBatch, kHidden});
}

INSTANTIATE_TEST_SUITE_P(Halves, Casts, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(core::name(info.param)); });

// ---- Promotion: both operands half, half with f32 both ways, both f32.
class Promotion : public ::testing::TestWithParam<DType> {
 protected:
  void check(const std::function<Tensor(const Tensor&, const Tensor&)>& f) const {
    const DType half = GetParam();
    for (const DType left : {half, DType::f32}) {
      for (const DType right : {half, DType::f32}) {
        const Tensor a = random({kBatch, kHidden}, left).set_requires_grad(true);
        const Tensor b = random({kBatch, kHidden}, right).set_requires_grad(true);
        Tensor loss;
        {
          const AutocastGuard autocast(true, half);
          const Tensor y = f(a, b);
          const bool both = left == half && right == half;
          EXPECT_EQ(y.dtype(), both ? half : DType::f32) << left << " with " << right;
          loss = sum(y);
        }
        backward(loss);
        EXPECT_EQ(a.grad().dtype(), left);
        EXPECT_EQ(b.grad().dtype(), right);
      }
    }
  }
};

TEST_P(Promotion, Atan2IsTheWidest) {
  check([](const Tensor& a, const Tensor& b) { return atan2(a, b); });
}
TEST_P(Promotion, MulIsTheWidest) {
  check([](const Tensor& a, const Tensor& b) { return mul(a, b); });
}
TEST_P(Promotion, CatIsTheWidest) {
  check([](const Tensor& a, const Tensor& b) { return concat({a, b}); });
}
TEST_P(Promotion, StackIsTheWidest) {
  check([](const Tensor& a, const Tensor& b) { return stack({a, b}); });
}
TEST(MixedHalves, GiveF32) {  // Apex: an error (#505)
  const Tensor a = random({2}, DType::f16), b = random({2}, DType::bf16);
  const AutocastGuard autocast(true);
  for (const Tensor& y : {a * b, atan2(a, b), concat({a, b}), stack({a, b})}) {
    EXPECT_EQ(y.dtype(), DType::f32);
  }
}

INSTANTIATE_TEST_SUITE_P(Halves, Promotion, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(core::name(info.param)); });

// ---- Recurrent cells and layers.
class RecurrentCasts : public ::testing::TestWithParam<DType> {
 protected:
  // Every result is half, every gradient has its own tensor's dtype.
  void check(nn::Module& model, const std::function<Tensors(const Tensor&)>& run,
             const Shape& shape) const {
    for (const DType input : {GetParam(), DType::f32}) {
      model.clear_grad();
      const Tensor x = random(shape, input).set_requires_grad(true);
      Tensor loss;
      {
        const AutocastGuard autocast(true, GetParam());
        for (const Tensor& y : run(x)) {
          EXPECT_EQ(y.dtype(), GetParam());
          loss = loss.defined() ? loss + sum(y) : sum(y);
        }
      }
      backward(loss);
      EXPECT_EQ(x.grad().dtype(), input);
      for (const NamedTensor& entry : model.parameters()) {
        ASSERT_TRUE(entry.tensor.grad().defined()) << entry.name;
        EXPECT_EQ(entry.tensor.grad().dtype(), DType::f32) << entry.name;
      }
    }
  }

  // The state starts in f32: it is cast like every other input.
  void check_cell(nn::RecurrentCell& cell, bool lstm) const {
    const auto run = [&](const Tensor& x) {
      nn::RnnState state{Tensor::zeros({kBatch, kHidden}),
                         lstm ? Tensor::zeros({kBatch, kHidden}) : Tensor()};
      Tensors results;
      for (std::int64_t t = 0; t < kTime; ++t) {
        state = cell.step(reshape(slice(x, 0, t, t + 1), {kBatch, kHidden}), state);
        results.push_back(state.h);
        if (lstm) results.push_back(state.c);
      }
      return results;
    };
    check(cell, run, {kTime, kBatch, kHidden});
  }

  template <class Layer>
  void check_layers(const std::vector<std::int64_t>& lengths) const {
    for (const auto& [layers, both] : {std::pair{1, false}, {2, false}, {2, true}}) {
      Layer layer(kHidden, kHidden, {.layers = layers, .bidirectional = both});
      const std::int64_t states = layers * (both ? 2 : 1);
      const bool lstm = std::is_same_v<Layer, nn::LSTM>;
      const auto run = [&](const Tensor& x) {
        const Tensor zeros = Tensor::zeros({states, kBatch, kHidden});
        const nn::RnnOutput out = layer.run(x, {zeros, lstm ? zeros : Tensor()}, lengths);
        Tensors results{out.y, out.state.h};
        if (lstm) results.push_back(out.state.c);
        return results;
      };
      check(layer, run, {kTime, kBatch, kHidden});
    }
  }

  static std::vector<std::int64_t> lengths() {  // as test_rnn_packed: from t down
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < kBatch; ++i)
      lengths.push_back(std::max<std::int64_t>(1, kTime - i));
    return lengths;
  }
};

TEST_P(RecurrentCasts, CellsAreHalf) {
  nn::RNNCell rnn(kHidden, kHidden), relu(kHidden, kHidden, {.relu = true});
  nn::GRUCell gru(kHidden, kHidden);
  nn::LSTMCell lstm(kHidden, kHidden);
  check_cell(rnn, false);
  check_cell(relu, false);
  check_cell(gru, false);
  check_cell(lstm, true);
}
TEST_P(RecurrentCasts, RnnIsHalf) {
  check_layers<nn::RNN>({});
}
TEST_P(RecurrentCasts, GruIsHalf) {
  check_layers<nn::GRU>({});
}
TEST_P(RecurrentCasts, LstmIsHalf) {
  check_layers<nn::LSTM>({});
}
TEST_P(RecurrentCasts, PackedSequencesAreHalf) {
  check_layers<nn::RNN>(lengths());
  check_layers<nn::GRU>(lengths());
  check_layers<nn::LSTM>(lengths());
}

INSTANTIATE_TEST_SUITE_P(Halves, RecurrentCasts, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(core::name(info.param)); });

}  // namespace
}  // namespace cairn
