#include "cairn/kernels/optimizer_update.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "support/message_of.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::all_mixes;
using test::entries_of;
using test::expect_close;
using test::LaidOut;
using test::Layout;
using test::make_parameter;
using test::Master;
using test::message_of;
using test::Mix;
using test::Parameter;
using test::random_values;
using test::Values;

// What the rules should do, in double precision.
void expect(Parameter& p, const AdamOptions& o) {
  const Values g = p.g(o.gradient_scale);
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    const double grad = g[i] + (o.adamw ? 0.0 : o.weight_decay * p.w[i]);
    p.m[i] = o.beta1 * p.m[i] + (1 - o.beta1) * grad;
    p.v[i] = o.beta2 * p.v[i] + (1 - o.beta2) * grad * grad;
    double step = p.m[i] / o.correction1 / (std::sqrt(p.v[i] / o.correction2) + o.eps);
    if (o.adamw) step += o.weight_decay * p.w[i];
    p.w[i] -= o.lr * step;
  }
}

void expect(Parameter& p, const SgdOptions& o) {
  const Values g = p.g(o.gradient_scale);
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    double grad = g[i];
    if (!o.wd_after_momentum) grad += o.weight_decay * p.w[i];
    if (o.momentum != 0) {
      p.m[i] = o.first_step ? grad : o.momentum * p.m[i] + (1 - o.dampening) * grad;
      grad = o.nesterov ? grad + o.momentum * p.m[i] : p.m[i];
    }
    if (o.wd_after_momentum) grad += o.weight_decay * p.w[i];
    p.w[i] -= o.lr * grad;
  }
}

void expect(Parameter& p, const AdagradOptions& o) {
  const Values g = p.g(o.gradient_scale);
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    const double grad = g[i] + (o.adagrad_w ? 0.0 : o.weight_decay * p.w[i]);
    p.m[i] += grad * grad;
    double step = grad / (std::sqrt(p.m[i]) + o.eps);
    if (o.adagrad_w) step += o.weight_decay * p.w[i];
    p.w[i] -= o.lr * step;
  }
}

void expect(Parameter& p, const RmsPropOptions& o) {
  const Values g = p.g(o.gradient_scale);
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    const double grad = g[i] + o.weight_decay * p.w[i];
    p.m[i] = o.alpha * p.m[i] + (1 - o.alpha) * grad * grad;
    double step = grad / (std::sqrt(p.m[i]) + o.eps);
    if (o.momentum != 0) step = p.v[i] = o.momentum * p.v[i] + step;
    p.w[i] -= o.lr * step;
  }
}

void expect(Parameter& p, const NovoGradOptions& o) {
  const Values g = p.g(o.gradient_scale);
  const double d = p.norm / std::sqrt(o.correction2) + o.eps;
  const double b3 = o.grad_averaging ? 1 - o.beta1 : 1;
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    if (o.reg_inside_moment) {
      p.m[i] = o.beta1 * p.m[i] + b3 * (g[i] / d + o.weight_decay * p.w[i]);
      p.w[i] -= o.lr * p.m[i] / o.correction1;
    } else {
      p.m[i] = o.beta1 * p.m[i] + b3 * g[i];
      p.w[i] -= o.lr * (p.m[i] / o.correction1 / d + o.weight_decay * p.w[i]);
    }
  }
}

class Updates : public testing::TestWithParam<Device> {
 protected:
  Tensor make(std::int64_t n, DType dtype, std::uint64_t seed) const {
    return Tensor::from(random_values(n, seed), {n}, dtype, GetParam());
  }

  /// A step of every mix of dtypes in one list, at `n` elements, aligned and at all offsets.
  template <class Options>
  void check(std::int64_t n, const Options& options, int moments) const {
    std::vector<Parameter> all;
    std::int64_t turn = 0;
    for (const Mix& mix : all_mixes()) {
      for (std::int64_t shift : {std::int64_t{0}, 1 + turn++ % 7}) {
        all.push_back(make_parameter(mix, n, GetParam(), moments, shift));
        all.back().norm = 0.5 + 0.1 * static_cast<double>(turn % 3);
      }
    }
    update(entries_of(all), options);
    for (Parameter& p : all) {
      expect(p, options);
      p.expect_matches();
    }
  }
};

constexpr std::int64_t kOptimizerUpdateSizes[] = {0, 1, 5, 77, 1031};
constexpr std::int64_t kTwoChunks = 65536 + 19;

TEST_P(Updates, AdamMatchesTheReferenceForEveryMixOfDtypes) {
  for (bool adamw : {false, true}) {
    const AdamOptions options{.lr = 0.05,
                              .beta1 = 0.8,
                              .beta2 = 0.9,
                              .eps = 1e-3,
                              .weight_decay = 0.1,
                              .adamw = adamw,
                              .correction1 = 0.36,
                              .correction2 = 0.19,
                              .gradient_scale = 0.5};
    for (std::int64_t n : kOptimizerUpdateSizes) check(n, options, 2);
    if (adamw) check(kTwoChunks, options, 2);
  }
}

TEST_P(Updates, SgdMatchesTheReferenceForEveryOption) {
  const SgdOptions cases[] = {
      {.lr = 0.1},
      {.lr = 0.1, .weight_decay = 0.1, .gradient_scale = 0.25},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .first_step = true},
      {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .gradient_scale = 2},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .wd_after_momentum = true},
      {.lr = 0.1, .weight_decay = 0.1, .wd_after_momentum = true}};
  for (const SgdOptions& options : cases) check(1031, options, options.momentum != 0 ? 1 : 0);
  for (std::int64_t n : kOptimizerUpdateSizes) check(n, cases[4], 1);
}

/// Of every size and mix of dtypes, where the first moment holds squares.
template <class Options>
void check_with_squares(const Options& options, Device device) {
  std::vector<Parameter> all;
  for (std::int64_t n : kOptimizerUpdateSizes) {
    for (const Mix& mix : all_mixes()) {
      const std::int64_t shift = all.size() % 2 == 0 ? 0 : 3;
      Parameter p = make_parameter(mix, n, device, options.moments(), shift);
      p.moment1 = test::Placed(random_values(n, 9, 0, 1), mix.moments, device, shift);
      p.m = p.moment1.values();
      all.push_back(p);
    }
  }
  update(entries_of(all), options);
  for (Parameter& p : all) {
    expect(p, options);
    p.expect_matches();
  }
}

TEST_P(Updates, RmsPropMatchesTheReferenceWithAndWithoutMomentum) {
  for (const double momentum : {0.0, 0.9}) {
    check_with_squares(RmsPropOptions{.lr = 0.1,
                                      .alpha = 0.9,
                                      .eps = 1e-3,
                                      .momentum = momentum,
                                      .weight_decay = 0.1,
                                      .gradient_scale = 0.5},
                       GetParam());
  }
}

TEST_P(Updates, AdagradMatchesTheReferenceInBothModes) {
  for (const bool adagrad_w : {false, true}) {
    check_with_squares(AdagradOptions{.lr = 0.1,
                                      .eps = 1e-3,
                                      .weight_decay = 0.1,
                                      .adagrad_w = adagrad_w,
                                      .gradient_scale = 0.5},
                       GetParam());
  }
}

TEST_P(Updates, NovoGradMatchesTheReferenceInBothModes) {
  for (bool inside : {false, true}) {
    for (bool averaging : {false, true}) {
      const NovoGradOptions options{.lr = 0.05,
                                    .beta1 = 0.8,
                                    .eps = 1e-3,
                                    .weight_decay = 0.1,
                                    .grad_averaging = averaging,
                                    .reg_inside_moment = inside,
                                    .correction1 = 0.36,
                                    .correction2 = 0.19,
                                    .gradient_scale = 0.5};
      for (std::int64_t n : kOptimizerUpdateSizes) check(n, options, 1);
    }
  }
}

TEST_P(Updates, NovoGradOfATensorWithoutGradientIsFinite) {
  const Tensor w = make(40, DType::f32, 1), g = Tensor::zeros({40}, DType::f32, GetParam()),
               m = Tensor::zeros({40}, DType::f32, GetParam());
  const Values before = w.to_vector<double>();
  update({{g, w, {}, m, {}}}, NovoGradOptions{});
  EXPECT_EQ(w.to_vector<double>(), before);
}

TEST_P(Updates, EveryEntryHasItsFactorItsL2AndItsNorm) {
  const auto with_scalars = [&](int moments, const auto& options) {
    std::vector<Parameter> all;
    for (std::int64_t k = 0; k < 600; ++k) {  // more than the device is told of at once
      const auto mixes = all_mixes();
      all.push_back(make_parameter(mixes[static_cast<std::size_t>(k) % mixes.size()], k % 23,
                                   GetParam(), moments, k % 8, static_cast<std::uint64_t>(k)));
      all.back().gradient_factor = 0.25 * static_cast<double>(k % 5);
      all.back().l2 = 0.1 * static_cast<double>(k % 3);
      all.back().norm = 0.2 * static_cast<double>(k % 7 + 1);
    }
    update(entries_of(all), options);
    for (Parameter& p : all) {
      expect(p, options);
      p.expect_matches();
    }
  };
  with_scalars(2, AdamOptions{.lr = 0.05, .eps = 1e-2, .weight_decay = 0.1, .adamw = false});
  with_scalars(1, SgdOptions{.lr = 0.1, .momentum = 0.5, .gradient_scale = 0.5});
  with_scalars(1, NovoGradOptions{.lr = 0.05, .eps = 1e-2});
}

TEST_P(Updates, AFirstStepFromNothing) {
  Parameter p =
      make_parameter({DType::bf16, DType::bf16, DType::f32, Master::f32}, 333, GetParam(), 2, 1);
  for (test::Placed* moment : {&p.moment1, &p.moment2}) {
    *moment = test::Placed(Values(333, 0.0), DType::f32, GetParam(), 0);
  }
  p.m = p.v = Values(333, 0.0);
  const AdamOptions options{.lr = 0.01, .correction1 = 1 - 0.9, .correction2 = 1 - 0.999};
  update({p.entry()}, options);
  expect(p, options);
  p.expect_matches();
}

TEST_P(Updates, UnusedMomentsAreLeftAlone) {
  const Tensor w = make(9, DType::f32, 1), g = make(9, DType::f32, 2), m = make(9, DType::i32, 3),
               v = make(9, DType::f16, 4);
  Values expected = w.to_vector<double>(), unused = v.to_vector<double>();
  for (std::size_t i = 0; i < 9; ++i) expected[i] -= 0.5 * g.to_vector<double>()[i];
  update({{g, w, {}, m, v}}, SgdOptions{.lr = 0.5});
  expect_close(w, expected, 1e-6, 1e-7);
  EXPECT_EQ(v.to_vector<double>(), unused);
}

TEST_P(Updates, EmptyListsDoNothing) {
  update({}, AdamOptions{}), update({}, SgdOptions{}), update({}, AdagradOptions{}),
      update({}, RmsPropOptions{}), update({}, NovoGradOptions{});
  const Tensor none = Tensor::zeros({0}, DType::f32, GetParam());
  update({{none, none, {}, none, none}}, AdamOptions{});
}

TEST_P(Updates, ChannelsLastParametersAreUpdatedInPlace) {
  const Shape shape{3, 4, 5, 6};
  const auto laid = [&](std::uint64_t seed, double low) {
    return LaidOut(random_values(shape.numel(), seed, low, 1), shape, DType::f32, GetParam(),
                   Layout::channels_last);
  };
  const LaidOut g = laid(1, -1), w = laid(2, -1), m = laid(3, -1), v = laid(4, 0);
  Parameter p;
  p.gradient = test::Placed(g.values(), DType::f32, GetParam(), 0);
  p.w = w.values(), p.m = m.values(), p.v = v.values();
  update({{g, w, {}, m, v}}, AdamOptions{});
  expect(p, AdamOptions{});
  expect_close(w.values(), p.w, 1e-6, 1e-7);
}

TEST(UpdatesOnStreams, FollowTheCurrentStream) {
  const Tensor g = Tensor::full({1000}, 1.0), w = Tensor::full({1000}, 1.0);
  const core::Stream stream = core::Stream::create({});
  {
    const core::StreamGuard guard(stream);
    update({{g, w, {}, {}, {}}}, SgdOptions{.lr = 0.5});
    update({{g, w, {}, {}, {}}}, SgdOptions{.lr = 0.25});
  }
  stream.synchronize();
  EXPECT_EQ(w.to_vector<double>(), Values(1000, 0.25));
}

TEST_P(Updates, ErrorsNameTheEntry) {
  const Tensor w = make(6, DType::f32, 1), g = make(6, DType::f32, 2),
               wide = Tensor::zeros({6, 2}, DType::f32, GetParam());
  const auto adam = [&](UpdateEntry second) {
    return message_of([&] { update({{g, w, {}, g, g}, second}, AdamOptions{}); });
  };
  EXPECT_EQ(adam({g, w, {}, g, {}}), "[adam_update] expected a moment2 in entry 1, got none");
  EXPECT_EQ(adam({g, w, {}, make(6, DType::f16, 3), g}),
            "[adam_update] expected the moment1 of entry 1 of dtype f32 or bf16, got f16");
  EXPECT_EQ(adam({g, w, {}, g, make(6, DType::bf16, 3)}),
            "[adam_update] expected both moments of entry 1 of one dtype, got f32 and bf16");
  EXPECT_EQ(adam({g, w, make(6, DType::i16, 3), g, g}),
            "[adam_update] expected a bf16 weight beside the i16 remainder of entry 1, got f32");
  EXPECT_EQ(adam({g, w, make(6, DType::f16, 3), g, g}),
            "[adam_update] expected the master of entry 1 of dtype f32, or i16 beside a bf16 "
            "weight, got f16");
  EXPECT_EQ(adam({make(5, DType::f32, 3), w, {}, g, g}),
            "[adam_update] expected the gradient of entry 1 of shape [6] and strides [1] like its "
            "weight, got [5] and [1]");
  EXPECT_EQ(adam({wide.view().select(1, 0), wide.view().select(1, 0), {}, g, g}),
            "[adam_update] expected a dense weight 1 (no gaps, no repeats), got shape [6] with "
            "strides [2]");
}

INSTANTIATE_TEST_SUITE_P(Devices, Updates, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
