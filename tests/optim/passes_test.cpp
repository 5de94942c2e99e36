// The host waits for the device once a step, in every configuration.
#include "cairn/kernels/multi_tensor.h"
#include "support.h"

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

TEST(Passes, AStepWaitsOnceAppliedOrSkippedAndAnUncheckedOneNever) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  const auto waits_of = [&](const StepOptions& options, bool applied) {
    return reads([&] { EXPECT_EQ(optimizer.step(options).applied, applied); });
  };
  write_gradients(parameters, 1);
  EXPECT_EQ(waits_of({.gradient_scale = 0.5, .max_gradient_norm = 0.1}, true), 1);
  EXPECT_EQ(waits_of({}, false), 0);     // no gradients
  write_gradients(parameters, 1, 1e30);  // inf in f16
  EXPECT_EQ(waits_of({}, false), 1);
  write_gradients(parameters, 1);
  EXPECT_EQ(waits_of({.check = false}, true), 0);
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
        expect_applied(optimizer.update(
            reports[1], {.max_gradient_norm = 1.0, .norm_type = 1.0, .per_group_norm = true}));
      }),
      1);
}

}  // namespace
}  // namespace cairn::optim
