// Parameters of one optimizer on several devices, and parameters that move.
#include <cmath>
#include <cstdlib>

#include "cairn/optim/optimizer_access.h"
#include "support.h"

namespace cairn::optim {
namespace {

using test::less;

const bool kTwoDevices = ::setenv("CAIRN_CPU_DEVICES", "2", /*overwrite=*/1) == 0;
const Device kFirst{core::DeviceType::cpu, 0}, kSecond{core::DeviceType::cpu, 1};

NamedTensors on_both(DType dtype = DType::f32) {
  return {make_parameter("a", {5}, 1, dtype, kFirst), make_parameter("b", {7}, 2, dtype, kSecond),
          make_parameter("c", {3}, 3, dtype, kFirst)};
}

TEST(Devices, OneBufferEachAndOneNormOverAll) {
  ASSERT_TRUE(kTwoDevices);
  const NamedTensors parameters = on_both();
  FusedSGD optimizer(parameters, {.lr = 1.0});
  EXPECT_EQ(GradientArena::of(parameters[0].tensor)->buffers().size(), 2u);
  const Values before = values(parameters[1].tensor);
  for (const auto& [name, tensor] : parameters) {
    write_gradient(tensor, Values(static_cast<std::size_t>(tensor.numel()), 2.0));
  }
  const StepResult result = optimizer.step({.max_gradient_norm = 1.0});
  const double norm = std::sqrt(15 * 4.0);
  EXPECT_NEAR(result.gradient_norm, norm, 1e-6);
  test::expect_close(parameters[1].tensor, less(before, 2.0 / (norm + 1e-6)), 1e-6, 1e-6);
}

TEST(Devices, ACulpritOnAnyDeviceSkipsAll) {
  const NamedTensors parameters = on_both(DType::f16);
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1);
  write_gradient(parameters[1].tensor, Values(7, 1e9));
  const Values before = values(parameters[0].tensor);
  EXPECT_EQ(optimizer.step().culprit, "b");
  EXPECT_EQ(values(parameters[0].tensor), before);
}

void move_to_second(Tensor parameter, Optimizer& optimizer) {
  const Tensor moved = Tensor::empty(parameter.shape(), parameter.dtype(), kSecond);
  kernels::copy(parameter, moved);
  parameter.set_data(moved);
  OptimizerAccess(optimizer).refresh();
}

TEST(Devices, MastersAndMomentsMoveWithTheirParameter) {
  const NamedTensors moving = {make_parameter("w", {33}, 1, DType::bf16, kFirst)};
  const NamedTensors staying = {make_parameter("w", {33}, 1, DType::bf16, kFirst)};
  FusedAdam mover(moving), stayer(staying);
  for (std::uint64_t step = 0; step < 6; ++step) {
    if (step == 3) move_to_second(moving[0].tensor, mover);
    train(mover, moving, step);
    train(stayer, staying, step);
  }
  EXPECT_EQ(kernels::MasterWeight::of(moving[0].tensor)->tensor().device(), kSecond);
  EXPECT_EQ(moving[0].tensor.gradient_slot().memory().device(), kSecond);
  EXPECT_EQ(moment_of(mover, "w").device(), kSecond);
  EXPECT_EQ(values(moving[0].tensor), values(staying[0].tensor));
}

TEST(Devices, AParameterThatMovesDropsItsGradientAndItsStash) {
  const Tensor parameter = make_parameter("w", {33}, 1, DType::f32, kFirst).tensor;
  FusedSGD optimizer(NamedTensors{{"w", parameter}}, {.lr = 1.0});
  const Values before = values(parameter);
  write_gradient(parameter, Values(33, 0.5));
  (void)optimizer.stash();
  move_to_second(parameter, optimizer);
  EXPECT_FALSE(OptimizerAccess(optimizer).has_gradient());
  write_gradient(parameter, Values(33, 0.25));
  (void)optimizer.stash();
  EXPECT_EQ(parameter.gradient_slot().sum().device(), kSecond);
  expect_applied(optimizer.step());
  test::expect_close(parameter, less(before, 0.25), 1e-6, 1e-6);
}

}  // namespace
}  // namespace cairn::optim
