// What holds for every rule: skips leave no trace, late and frozen parameters, groups that come
// later, clipping beside a rule's own norms.
#include <gmock/gmock.h>

#include <cmath>

#include "cairn/kernels/multi_tensor.h"
#include "reference.h"
#include "support.h"

namespace cairn::optim {
namespace {

NamedTensors rule_parameters(DType dtype = DType::f32) {
  return {make_parameter("a", {3, 5}, 1, dtype), make_parameter("b", {7}, 2, dtype),
          make_parameter("c", {2}, 3, dtype)};
}

class EveryRule : public testing::TestWithParam<Rule> {};
INSTANTIATE_TEST_SUITE_P(Rules, EveryRule, testing::ValuesIn(rules()),
                         [](const auto& info) { return info.param.name; });

TEST_P(EveryRule, ASkippedStepLeavesNoTrace) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const NamedTensors a = rule_parameters(dtype), b = rule_parameters(dtype);
    const auto skipping = GetParam().make({{a, 0.1, 0.01}});
    const auto clean = GetParam().make({{b, 0.1, 0.01}});
    for (std::uint64_t step = 0; step < 6; ++step) {
      if (step % 2 == 0) {
        write_gradients(a, 50 + step, 4.0);
        write_gradient(a[1].tensor, Values(7, step == 0 ? kInf : std::nan("")));
        const StepResult result = skipping->step({.max_gradient_norm = 1.0});
        EXPECT_FALSE(result.applied);
        EXPECT_EQ(result.culprit, "b");
      }
      train(*skipping, a, step);
      train(*clean, b, step);
    }
    EXPECT_EQ(exact(a), exact(b));
  }
}

TEST_P(EveryRule, ParametersComeLateOrNeverOrStandStill) {
  const NamedTensors a = rule_parameters(), b = rule_parameters();
  NamedTensors frozen = {a[2]};
  frozen[0].tensor.set_requires_grad(false);
  // a: a group without parameters, b only from the fourth step on, c frozen.
  const auto optimizer = GetParam().make({{{}, 0.1, 0.0}, {a, 0.1, 0.01}});
  const auto alone_a = GetParam().make({{{b[0]}, 0.1, 0.01}});
  const auto alone_b = GetParam().make({{{b[1]}, 0.1, 0.01}});
  const std::vector<Values> start = values(a);
  for (std::uint64_t step = 0; step < 8; ++step) {
    const Values ga = test::random_values(15, step, -0.1, 0.1);  // LAMB does not clip these
    const Values gb = test::random_values(7, 90 + step, -0.1, 0.1);
    write_gradient(a[0].tensor, ga);
    write_gradient(b[0].tensor, ga);
    expect_applied(alone_a->step());
    if (step >= 3) {
      write_gradient(a[1].tensor, gb);
      write_gradient(b[1].tensor, gb);
      expect_applied(alone_b->step());
    }
    expect_applied(optimizer->step());
  }
  EXPECT_EQ(values(a[0].tensor), values(b[0].tensor));
  EXPECT_EQ(values(a[1].tensor), values(b[1].tensor));
  EXPECT_EQ(values(a[2].tensor), start[2]);
}

TEST_P(EveryRule, AGroupThatComesLaterStartsAtItsBeginning) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const NamedTensors a = rule_parameters(dtype), b = rule_parameters(dtype);
    const auto optimizer = GetParam().make({{{a[0]}, 0.1, 0.01}});
    const auto alone = GetParam().make({{{b[1]}, 0.2, 0.0}});
    for (std::uint64_t step = 0; step < 3; ++step) train(*optimizer, {a[0]}, step, 0.1);
    // It has a gradient already, in a tensor of its own.
    const Values gradient = test::random_values(7, 77, -0.1, 0.1);
    write_gradient(a[1].tensor, gradient);
    optimizer->add_group({{a[1]}, 0.2, 0.0});
    EXPECT_TRUE(a[1].tensor.grad().defined());
    write_gradient(b[1].tensor, values(a[1].tensor.grad()));
    expect_applied(optimizer->step());
    expect_applied(alone->step());
    EXPECT_EQ(exact(a[1].tensor), exact(b[1].tensor));
  }
}

TEST_P(EveryRule, WaitsOnceWithClippingOfAnotherNorm) {
  const NamedTensors parameters = rule_parameters();
  const auto optimizer = GetParam().make({{parameters, 0.1, 0.01}});
  for (const double type : {1.0, 2.0, kInf}) {
    write_gradients(parameters, 5);
    const std::int64_t reads = kernels::host_reads();
    EXPECT_TRUE(optimizer->step({.max_gradient_norm = 0.5, .norm_type = type}).applied);
    EXPECT_EQ(kernels::host_reads(), reads + 1);
  }
}

/// One optimizer of two groups, and one of each group alone.
template <class Reference, class Options = decltype(Reference::options)>
void expect_own_betas(const Options& own = {.beta1 = 0.5, .beta2 = 0.8, .eps = 1e-3}) {
  const NamedTensors a = rule_parameters(), b = rule_parameters();
  typename Reference::Optimizer plain({a[0]}, {}), special({a[1], a[2]}, own);
  typename Reference::Optimizer both(
      {{{b[0]}, own.lr, own.weight_decay},
       {{b[1], b[2]}, own.lr, own.weight_decay, own.beta1, own.beta2, own.eps}},
      Options{});
  for (std::uint64_t step = 0; step < 3; ++step) {
    write_gradients(a, step, 0.1);  // LAMB does not clip these
    expect_applied(plain.step());
    expect_applied(special.step());
    train(both, b, step, 0.1);
  }
  EXPECT_EQ(exact(a), exact(b));
}

TEST(Rules, AGroupsOwnBetasAndEpsStandForTheRules) {
  expect_own_betas<reference::Adam>();
  expect_own_betas<reference::Lamb>();
  expect_own_betas<reference::NovoGrad>();
}

TEST(NovoGrad, LooksAtItsOwnNormOfClippedGradients) {
  const NamedTensors parameters = {make_parameter("a", {9}, 1)};
  const NovoGradOptions options{.lr = 0.1, .norm_type = kInf};
  FusedNovoGrad optimizer(parameters, options);
  reference::NovoGrad reference{options};
  Values expected = values(parameters[0].tensor);
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Values gradient = test::random_values(9, step, -8, 8);
    write_gradient(parameters[0].tensor, gradient);
    const double norm = test::norm_of(gradient) / 4;
    reference.update(expected, gradient, 0.25 * std::min(1.0, 1.5 / (norm + 1e-6)));
    expect_applied(optimizer.step({.gradient_scale = 0.25, .max_gradient_norm = 1.5}));
  }
  test::expect_close(parameters[0].tensor, expected, 4e-6, 2e-6);
}

TEST(NovoGrad, WorksOnStashedGradients) {
  const NamedTensors a = rule_parameters(), b = rule_parameters();
  FusedNovoGrad stashing(a), plain(b);
  for (std::uint64_t step = 0; step < 3; ++step) {
    for (const NamedTensors* parameters : {&a, &b}) write_gradients(*parameters, step);
    (void)stashing.stash(0.5);
    expect_applied(stashing.step());
    expect_applied(plain.step({.gradient_scale = 0.5}));
  }
  EXPECT_EQ(exact(a), exact(b));
}

TEST(NovoGrad, NamesAMissingNorm) {
  const NamedTensors parameters = rule_parameters();
  FusedNovoGrad optimizer(parameters);
  StateDict state = snapshot(optimizer.state_dict());
  StateDict entry;
  entry.set("step", std::int64_t{0});
  state.make_dict("state").set("b", entry);
  EXPECT_THAT(message_of<core::DataError>([&] { optimizer.load_state_dict(state); }),
              testing::HasSubstr("no 'b.norm'"));
}

}  // namespace
}  // namespace cairn::optim
