// The host waits for the device once a step, in every configuration.
#include "cairn/kernels/multi_tensor.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/sgd.h"
#include "support.h"
#include "support/step.h"

namespace cairn::optim {
namespace {

NamedTensors make() {
  return {make_parameter("a", {3, 5}, 1, DType::f16), make_parameter("b", {100}, 2),
          make_parameter("c", {7}, 3, DType::bf16)};
}

template <class Body>
std::int64_t reads(const Body& body) {
  const std::int64_t before = kernels::host_reads();
  body();
  return kernels::host_reads() - before;
}

TEST(Passes, AStepWaitsOnce) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1);
  EXPECT_EQ(
      reads([&] {
        test::expect_applied(optimizer.step({.gradient_scale = 0.5, .max_gradient_norm = 0.1}));
      }),
      1);
  EXPECT_EQ(reads([&] { EXPECT_FALSE(optimizer.step().applied); }), 0);  // no gradients
}

TEST(Passes, ASkippedStepWaitsOnce) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1, 1e30);  // inf in f16
  EXPECT_EQ(reads([&] { EXPECT_EQ(optimizer.step().culprit, "a"); }), 1);
}

TEST(Passes, AnUncheckedStepDoesNotWait) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1);
  EXPECT_EQ(reads([&] { test::expect_applied(optimizer.step({.check = false})); }), 0);
}

TEST(Passes, GroupsNormsLarcAndStashWaitOnceTogether) {
  const NamedTensors parameters = make();
  FusedSGD optimizer({{{parameters[0], parameters[1]}, 1e-3, 0}, {{parameters[2]}, 1e-2, 0}}, {});
  const LARC larc(optimizer);
  write_gradients(parameters, 1);
  EXPECT_EQ(
      reads([&] {
        const PendingReport moved = optimizer.stash(0.5);
        const auto reports = PendingReport::read({moved, optimizer.begin_check(1.0)});
        test::expect_applied(optimizer.update(
            reports[1], {.max_gradient_norm = 1.0, .norm_type = 1.0, .per_group_norm = true}));
      }),
      1);
}

TEST(Passes, SeveralOptimizersWaitOnceTogether) {
  const NamedTensors parameters = make();
  FusedAdam first({parameters[0]});
  FusedSGD second({parameters[1], parameters[2]}, {});
  write_gradients(parameters, 1);
  EXPECT_EQ(reads([&] {
              const auto reports = PendingReport::read({first.begin_check(), second.begin_check()});
              test::expect_applied(first.update(reports[0], {}));
              test::expect_applied(second.update(reports[1], {}));
            }),
            1);
}

}  // namespace
}  // namespace cairn::optim
