// Capturable optimizers have the bits of others, whatever order gradients come in.
#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <random>

#include "cairn/optim/optimizer_access.h"
#include "support.h"

namespace cairn::optim {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using MakeOfGroups = decltype(Rule::make);

std::vector<MakeOfGroups> makers() {
  using test::maker;
  return {maker<FusedAdam>(AdamOptions{}),
          maker<FusedAdam>(AdamOptions{.adamw = false, .bias_correction = false}),
          maker<FusedSGD>(SgdOptions{.momentum = 0.9, .dampening = 0.1}),
          maker<FusedSGD>(SgdOptions{}),
          maker<FusedAdagrad>(AdagradOptions{.lr_decay = 0.1, .initial_accumulator = 0.1}),
          maker<FusedLAMB>(LambOptions{.max_gradient_norm = 0.3}),
          maker<FusedLAMB>(LambOptions{.max_gradient_norm = 0, .use_nvlamb = true}),
          maker<FusedRMSprop>(RmsPropOptions{.momentum = 0.9})};
}

/// Two groups of parameters of every dtype.
std::vector<ParameterGroup> make_groups() {
  return {{{make_parameter("a", {5, 7}, 1), make_parameter("b", {33}, 2, DType::bf16)}, 1e-2, 0.1},
          {{make_parameter("c", {64}, 3, DType::f16), make_parameter("d", {3}, 4)}, 3e-3, 0.0}};
}

struct Both {
  std::unique_ptr<Optimizer> plain, capturable;

  explicit Both(const MakeOfGroups& make)
      : plain(make(make_groups())), capturable(make(make_groups())) {
    capturable->set_capturable(true);
  }
  void each(const std::function<void(Optimizer&)>& f) const { f(*plain), f(*capturable); }
};

void expect_same(const Both& both, const std::string& when) {
  EXPECT_EQ(both.plain->steps(), both.capturable->steps()) << when;
  for (std::size_t g = 0; g < both.plain->groups().size(); ++g) {
    EXPECT_EQ(exact(both.plain->groups()[g].parameters),
              exact(both.capturable->groups()[g].parameters))
        << when << ", group " << g;
  }
  EXPECT_EQ(test::flat(both.plain->state_dict()), test::flat(both.capturable->state_dict()))
      << when;
}

/// Gradients for the parameters that `which` has a bit for.
void write_some(Optimizer& optimizer, unsigned which, std::uint64_t seed, bool overflows) {
  for (ParameterGroup& group : optimizer.groups()) {
    for (const NamedTensor& parameter : group.parameters) {
      if ((which & 1u) != 0) {
        Values gradient = test::random_values(parameter.tensor.numel(), seed);
        if (overflows) gradient.back() = kNaN;
        write_gradient(parameter.tensor, gradient);
      }
      which >>= 1, ++seed;
    }
  }
}

TEST(Capturable, HasTheBitsOfOtherOptimizersInRandomOrders) {
  std::uint64_t seed = 0;
  for (const MakeOfGroups& make : makers()) {
    SCOPED_TRACE(seed);
    std::mt19937 random(static_cast<unsigned>(++seed));
    const Both both(make);
    for (int k = 0; k < 40; ++k) {
      const auto which = static_cast<unsigned>(random() % 3 == 0 ? random() % 16 : 15);
      const bool overflows = random() % 5 == 0;
      const std::uint64_t values_seed = random();
      StepOptions options{.gradient_scale = random() % 2 == 0 ? 1.0 : 0.125};
      if (random() % 3 == 0 && seed != 6) options.max_gradient_norm = 0.5;
      both.each([&](Optimizer& one) { write_some(one, which, values_seed, overflows); });
      const std::int64_t reads = kernels::host_reads();
      (void)both.capturable->step(options);
      EXPECT_EQ(kernels::host_reads(), reads);
      (void)both.plain->step(options);
      const auto change = random() % 8;
      if (change == 0) {
        both.each([&](Optimizer& one) { one.set_lr(1e-3 * (1 + k)); });
      } else if (change == 1) {
        const StateDict state = both.capturable->state_dict();
        both.each([&](Optimizer& one) { one.load_state_dict(state); });
      } else if (change == 2) {
        both.capturable->set_capturable(false);
        both.capturable->set_capturable(true);
      } else if (change == 3) {
        both.each([&](Optimizer& one) { one.groups()[1].weight_decay = 0.01 * k; });
      }
      expect_same(both, core::str("step ", k));
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Capturable, AGroupMayComeLate) {
  const Both both(makers().front());
  for (int k = 0; k < 3; ++k) {
    both.each([&](Optimizer& one) {
      write_some(one, 255, static_cast<std::uint64_t>(k), false);
      expect_applied(one.step());
      if (k == 0) one.add_group({{make_parameter("late", {9}, 8)}, 0.1, 0.0});
    });
  }
  EXPECT_TRUE(both.capturable->capturable());
  expect_same(both, "after a late group");
  EXPECT_EQ(test::flat(both.plain->torch_state_dict()),
            test::flat(both.capturable->torch_state_dict()))
      << "torch";
}

TEST(Capturable, NamesWhatOverflowedWhenItIsAsked) {
  FusedAdam optimizer(make_groups(), {});
  optimizer.set_capturable(true);
  write_some(optimizer, 0b0010, 1, true);
  EXPECT_FALSE(optimizer.step().known);
  write_some(optimizer, 0b1000, 1, true);
  expect_applied(optimizer.step());
  write_some(optimizer, 0b1111, 1, false);
  expect_applied(optimizer.step());
  EXPECT_THAT(OptimizerAccess(optimizer).take_overflowed(), ElementsAre("b", "d"));
  EXPECT_THAT(OptimizerAccess(optimizer).take_overflowed(), ElementsAre());
  EXPECT_EQ(optimizer.steps(), 1);
  const StepResult nothing = optimizer.step();
  EXPECT_TRUE(nothing.known);
  EXPECT_FALSE(nothing.applied);
}

TEST(Capturable, RefusesWhatTheHostWouldHaveToDecide) {
  const auto message = [](const auto& f) { return message_of<core::Unsupported>(f); };
  FusedNovoGrad novograd(make_groups(), {});
  EXPECT_THAT(message([&] { novograd.set_capturable(true); }), HasSubstr("got FusedNovoGrad"));
  FusedAdam adam(make_groups(), {});
  {
    const LARC larc(adam);
    EXPECT_THAT(message([&] { adam.set_capturable(true); }),
                HasSubstr("got LARC around FusedAdam"));
  }
  adam.set_capturable(true);
  EXPECT_THAT(message([&] { const LARC larc(adam); }),
              HasSubstr("expected an optimizer that is not"));
  write_some(adam, 15, 1, false);
  EXPECT_THAT(message([&] { (void)adam.step({.max_gradient_norm = 1, .norm_type = 1}); }),
              HasSubstr("got clipping by group or by another norm"));
  EXPECT_THAT(message([&] { (void)adam.step({.error_if_nonfinite = true}); }),
              HasSubstr("got error_if_nonfinite"));
  FusedLAMB lamb(make_groups(), {});
  lamb.set_capturable(true);
  EXPECT_THAT(message([&] { (void)lamb.step({.max_gradient_norm = 1}); }),
              HasSubstr("got max_gradient_norm beside a rule that clips by itself"));
}

}  // namespace
}  // namespace cairn::optim
