// A step reads every gradient twice and the host waits once: the kernels' entry points are counted
// through the linker (--wrap, see tests/CMakeLists.txt).
#include "cairn/kernels/multi_tensor.h"
#include "support.h"

namespace {

struct Calls {
  int checks = 0, updates = 0;
  std::int64_t checked_elements = 0, updated_elements = 0;
};
Calls calls;

std::int64_t elements(const std::vector<cairn::kernels::UpdateEntry>& entries) {
  std::int64_t sum = 0;
  for (const auto& entry : entries) sum += entry.gradient.numel();
  return sum;
}

}  // namespace

#define CHECK_GRADIENTS \
  _ZN5cairn7kernels15check_gradientsERKSt6vectorINS_4core10TensorViewESaIS3_EEb
#define ADAM_UPDATE \
  _ZN5cairn7kernels11adam_updateERKSt6vectorINS0_11UpdateEntryESaIS2_EERKNS0_11AdamOptionsE
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

using Views = std::vector<cairn::TensorView>;
using Entries = std::vector<cairn::kernels::UpdateEntry>;

extern "C" {
cairn::kernels::GradientCheck JOIN(__real_, CHECK_GRADIENTS)(const Views& gradients,
                                                             bool per_tensor);
void JOIN(__real_, ADAM_UPDATE)(const Entries& entries, const cairn::kernels::AdamOptions& options);

cairn::kernels::GradientCheck JOIN(__wrap_, CHECK_GRADIENTS)(const Views& gradients,
                                                             bool per_tensor) {
  ++calls.checks;
  for (const auto& gradient : gradients) calls.checked_elements += gradient.numel();
  return JOIN(__real_, CHECK_GRADIENTS)(gradients, per_tensor);
}
void JOIN(__wrap_, ADAM_UPDATE)(const Entries& entries,
                                const cairn::kernels::AdamOptions& options) {
  ++calls.updates;
  calls.updated_elements += elements(entries);
  JOIN(__real_, ADAM_UPDATE)(entries, options);
}
}

namespace cairn::optim {
namespace {

NamedTensors make() {
  return {make_parameter("a", {3, 5}, 1, DType::f16), make_parameter("b", {100}, 2),
          make_parameter("c", {7}, 3, DType::bf16)};
}

TEST(Passes, AStepReadsGradientsOnceToCheckAndOnceToUpdate) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1);
  calls = {};
  optimizer.step({.gradient_scale = 0.5, .max_gradient_norm = 0.1});
  EXPECT_EQ(calls.checks, 1);
  EXPECT_EQ(calls.checked_elements, 122);
  EXPECT_EQ(calls.updates, 1);
  EXPECT_EQ(calls.updated_elements, 122);
}

TEST(Passes, ASkippedStepReadsThemOnce) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1, 1e30);  // inf in f16
  calls = {};
  EXPECT_EQ(optimizer.step().culprit, "a");
  EXPECT_EQ(calls.updates, 0);
}

TEST(Passes, AnUncheckedStepReadsThemOnce) {
  const NamedTensors parameters = make();
  FusedAdam optimizer(parameters);
  write_gradients(parameters, 1);
  calls = {};
  optimizer.step({.check = false});
  EXPECT_EQ(calls.checks, 0);
  EXPECT_EQ(calls.updated_elements, 122);
}

TEST(Passes, OneUpdateCallForEachGroup) {
  NamedTensors parameters = make();
  FusedAdam optimizer({{{parameters[0], parameters[1]}, 1e-3, 0}, {{parameters[2]}, 1e-2, 0}}, {});
  write_gradients(parameters, 1);
  calls = {};
  optimizer.step();
  EXPECT_EQ(calls.checks, 1);
  EXPECT_EQ(calls.updates, 2);
  EXPECT_EQ(calls.updated_elements, 122);
}

}  // namespace
}  // namespace cairn::optim
