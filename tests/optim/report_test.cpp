// What checks report, and gradients gathered from several backwards.
#include "cairn/optim/report.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/sgd.h"
#include "reference.h"
#include "support.h"
#include "support/cpu_only.h"
#include "support/step.h"

namespace cairn::optim {
namespace {

using reference::Values;
using testing::HasSubstr;

constexpr double kReportInf = std::numeric_limits<double>::infinity();
constexpr double kReportNaN = std::numeric_limits<double>::quiet_NaN();

NamedTensors report_three() {
  return {make_parameter("a", {3, 5}, 1, DType::f16), make_parameter("b", {7}, 2, DType::bf16),
          make_parameter("c", {4}, 3)};
}

double norm_of(const Values& values, double type) {
  double sum = 0.0;
  for (const double x : values) {
    sum = std::isinf(type) ? std::max(sum, std::abs(x)) : sum + std::pow(std::abs(x), type);
  }
  return std::isinf(type) ? sum : std::pow(sum, 1 / type);
}

Values joined(const std::vector<Values>& parts) {
  Values all;
  for (const Values& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<Values> gradients_of(const NamedTensors& parameters) {
  std::vector<Values> all;
  for (const auto& [name, tensor] : parameters) all.push_back(values(tensor.grad()));
  return all;
}

TEST(Report, NamesEveryParameterThatIsNotFinite) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer({{{parameters[0]}, 0.1, 0}, {{parameters[1], parameters[2]}, 0.1, 0}}, {});
  write_gradients(parameters, 1);
  Values bad(7, 1.0), worse(4, -kReportInf);
  bad[1] = kReportNaN, bad[3] = kReportInf, bad[4] = kReportNaN;
  write_gradient(parameters[1].tensor, bad);
  write_gradient(parameters[2].tensor, worse);
  const GradientReport report = optimizer.begin_check().read();
  ASSERT_EQ(report.nonfinite.size(), 2u);
  EXPECT_EQ(report.nonfinite[0].parameter, "b");
  EXPECT_EQ(report.nonfinite[0].inf, 1);
  EXPECT_EQ(report.nonfinite[0].nan, 2);
  EXPECT_EQ(report.nonfinite[1].parameter, "c");
  EXPECT_EQ(report.nonfinite[1].inf, 4);
  EXPECT_EQ(report.nonfinite[1].nan, 0);
  EXPECT_EQ(report.culprit, "b");
  EXPECT_EQ(report.describe(), "NaN in the gradient of b (3 elements)");
  EXPECT_NEAR(report.norms_of(2.0)[1], 2.0, 1e-6);  // of the four finite ones
  EXPECT_EQ(report.norms_of(2.0)[2], 0.0);
}

TEST(Report, NormsByParameterAndGroupOfEveryType) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer(
      {{{parameters[0]}, 0.1, 0}, {{}, 0.1, 0}, {{parameters[1], parameters[2]}, 0.1, 0}}, {});
  write_gradients(parameters, 5, 3.0);
  const auto gradients = gradients_of(parameters);
  for (const double type : {2.0, 1.0, 3.5, kReportInf}) {
    const GradientReport report = optimizer.begin_check(type).read();
    EXPECT_TRUE(report.checked());
    EXPECT_EQ(report.norm_type, type);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(report.norms_of(type)[i], norm_of(gradients[i], type), 1e-4);
    }
    ASSERT_EQ(report.group_norms.size(), 3u);
    EXPECT_NEAR(report.group_norms[0], norm_of(gradients[0], type), 1e-4);
    EXPECT_EQ(report.group_norms[1], 0.0);
    EXPECT_NEAR(report.group_norms[2], norm_of(joined({gradients[1], gradients[2]}), type), 1e-4);
    EXPECT_NEAR(report.norm(), norm_of(joined(gradients), type), 1e-4);
  }
  EXPECT_THROW(optimizer.begin_check(2.0).read().norms_of(kReportInf), core::InvalidArgument);
  EXPECT_THROW(GradientReport().norms_of(2.0), core::InvalidArgument);
  EXPECT_THROW(optimizer.begin_check(0.5).read(), core::InvalidArgument);
  EXPECT_THROW(optimizer.begin_check(kReportNaN).read(), core::InvalidArgument);
}

TEST(Report, SeveralOptimizersAreReadTogether) {
  const NamedTensors parameters = report_three();
  FusedSGD first({parameters[0], parameters[1]}, {});
  FusedAdam second({parameters[2]});
  write_gradients(parameters, 1);
  write_gradient(parameters[2].tensor, Values(4, kReportNaN));
  const auto reports = PendingReport::read({first.begin_check(), second.begin_check()});
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_TRUE(reports[0].finite());
  EXPECT_EQ(reports[1].culprit, "c");
  EXPECT_EQ(reports[0].squared_norm, first.begin_check().read().squared_norm);
  EXPECT_TRUE(PendingReport::read(std::vector<PendingReport>{}).empty());
}

TEST(Clipping, ByEveryTypeOfNorm) {
  for (const double type : {2.0, 1.0, 3.5, kReportInf}) {
    const NamedTensors parameters = {make_parameter("a", {15}, 1), make_parameter("b", {7}, 2)};
    FusedSGD optimizer(parameters, {.lr = 1.0});
    write_gradients(parameters, 5, 256.0);
    const auto gradients = gradients_of(parameters);
    Values expected = values(parameters[0].tensor);
    const double norm = norm_of(joined(gradients), type) / 64;
    const double coefficient = 0.5 / (norm + 1e-6);
    for (std::size_t i = 0; i < 15; ++i) expected[i] -= gradients[0][i] / 64 * coefficient;
    const StepResult result =
        optimizer.step({.gradient_scale = 1.0 / 64, .max_gradient_norm = 0.5, .norm_type = type});
    EXPECT_NEAR(result.gradient_norm, norm, 1e-5 * norm);
    EXPECT_NEAR(result.clip_coefficient, coefficient, 1e-5);
    test::expect_close(parameters[0].tensor, expected, 1e-6, 1e-6);
  }
}

TEST(Clipping, EachGroupByItsOwnNorm) {
  const NamedTensors parameters = {make_parameter("a", {4}, 1), make_parameter("b", {9}, 2)};
  FusedSGD optimizer({{{parameters[0]}, 1.0, 0}, {{parameters[1]}, 1.0, 0}}, {});
  const Values a = values(parameters[0].tensor), b = values(parameters[1].tensor);
  write_gradient(parameters[0].tensor, Values(4, 0.25));  // norm 0.5
  write_gradient(parameters[1].tensor, Values(9, 2.0));   // norm 6
  const StepResult result = optimizer.step({.max_gradient_norm = 1.5, .per_group_norm = true});
  EXPECT_NEAR(result.gradient_norm, std::sqrt(36.25), 1e-6);
  EXPECT_NEAR(result.clip_coefficient, 0.25, 1e-6);
  Values expected_a = a, expected_b = b;
  for (double& w : expected_a) w -= 0.25;
  for (double& w : expected_b) w -= 2.0 * 1.5 / (6.0 + 1e-6);
  test::expect_close(parameters[0].tensor, expected_a, 1e-6, 1e-6);
  test::expect_close(parameters[1].tensor, expected_b, 1e-6, 1e-6);
}

TEST(Clipping, NonFiniteGradientsAreAnErrorIfAsked) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer(parameters, {});
  write_gradients(parameters, 1);
  write_gradient(parameters[1].tensor, Values(7, kReportInf));
  write_gradient(parameters[2].tensor, Values(4, kReportNaN));
  const Values before = values(parameters[0].tensor);
  for (const bool check : {true, false}) {
    try {
      (void)optimizer.step({.check = check, .max_gradient_norm = 1.0, .error_if_nonfinite = true});
      ADD_FAILURE() << "no error";
    } catch (const core::Error& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("got inf in the gradient of b (7 elements) and 1 more parameter"));
    }
  }
  EXPECT_EQ(values(parameters[0].tensor), before);
  EXPECT_TRUE(parameters[1].tensor.grad().defined());
  EXPECT_FALSE(optimizer.step().applied);
}

TEST(Clipping, NeedsAReportOfItsNorm) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer(parameters, {});
  write_gradients(parameters, 1);
  EXPECT_THROW((void)optimizer.update({}, {.max_gradient_norm = 1.0}), core::InvalidArgument);
  EXPECT_THROW((void)optimizer.update(optimizer.begin_check(2.0).read(),
                                      {.max_gradient_norm = 1.0, .norm_type = 1.0}),
               core::InvalidArgument);
  EXPECT_THROW((void)optimizer.step({.max_gradient_norm = -1.0}), core::InvalidArgument);
  EXPECT_THROW((void)optimizer.step({.gradient_scale = kReportInf}), core::InvalidArgument);
}

TEST(Report, IsOfTheParametersThatWereThere) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer({parameters[0], parameters[1]}, {});
  write_gradients(parameters, 1);
  const GradientReport report = optimizer.begin_check().read();
  optimizer.add_group({{parameters[2]}, 0.1, 0.0});
  EXPECT_THROW((void)optimizer.update(report, {}), core::InvalidArgument);
  EXPECT_TRUE(optimizer.update(optimizer.begin_check().read(), {}).applied);
}

bool any_sum(const NamedTensors& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const NamedTensor& parameter) {
    return parameter.tensor.gradient_slot().has_sum();
  });
}

class StashOnDevice : public testing::TestWithParam<Device> {};

TEST_P(StashOnDevice, SumsBackwardsOfDifferentScales) {
  NamedTensors parameters = {make_parameter("a", {3, 5}, 1, DType::f16, GetParam()),
                             make_parameter("b", {7}, 2, DType::f32, GetParam()),
                             make_parameter("c", {4}, 3, DType::bf16, GetParam())};
  FusedSGD optimizer(parameters, {.lr = 0.5});
  EXPECT_FALSE(any_sum(parameters));
  write_gradient(parameters[0].tensor, Values(15, 8.0));
  write_gradient(parameters[1].tensor, Values(7, 16.0));
  EXPECT_TRUE(optimizer.stash(1.0 / 8).read().finite());
  EXPECT_TRUE(any_sum(parameters));
  EXPECT_EQ(values(parameters[0].tensor.grad()), Values(15, 1.0));  // the sum
  write_gradient(parameters[0].tensor, Values(15, 1.0));
  EXPECT_THROW(parameters[0].tensor.grad(), core::InvalidArgument);
  write_gradient(parameters[2].tensor, Values(4, 3.0));
  EXPECT_TRUE(optimizer.stash(1.0 / 4096).read().finite());

  std::vector<Values> expected;
  for (const auto& [name, tensor] : parameters) expected.push_back(values(tensor));
  const Values sums = {1.0 + 1.0 / 4096, 2.0, 3.0 / 4096};  // the first is no f16
  for (std::size_t i = 0; i < 3; ++i) {
    for (double& w : expected[i]) w -= 0.5 * sums[i];
  }
  const StepResult result = optimizer.step();
  EXPECT_NEAR(result.gradient_norm,
              std::sqrt(15 * sums[0] * sums[0] + 7 * 4.0 + 4 * sums[2] * sums[2]), 1e-5);
  test::expect_close(kernels::MasterWeight::of(parameters[0].tensor)->tensor(), expected[0], 1e-7,
                     1e-7);
  test::expect_close(parameters[1].tensor, expected[1], 1e-7, 1e-7);
  test::expect_close(kernels::MasterWeight::of(parameters[2].tensor)->tensor(), expected[2], 1e-7,
                     1e-7);
  EXPECT_FALSE(any_sum(parameters));
}

TEST_P(StashOnDevice, ChecksWhatItMoves) {
  const NamedTensors parameters = {make_parameter("a", {3}, 1, DType::f16, GetParam()),
                                   make_parameter("b", {3}, 2, DType::f32, GetParam())};
  FusedSGD optimizer(parameters, {});
  write_gradients(parameters, 1);
  optimizer.stash(1.0);
  write_gradients(parameters, 1);
  write_gradient(parameters[0].tensor, {1.0, kReportInf, 1e9});
  GradientReport report = optimizer.stash(0.5).read();
  EXPECT_EQ(report.describe(), "inf in the gradient of a (2 elements)");
  report = optimizer.begin_check().read();
  EXPECT_EQ(report.culprit, "a");
  EXPECT_FALSE(optimizer.skip(report, {}).applied);
  EXPECT_FALSE(any_sum(parameters));
}
INSTANTIATE_TEST_SUITE_P(Devices, StashOnDevice, testing::ValuesIn(test::devices()),
                         test::device_name);

TEST(Stash, TakesInWhatCameIntoTheSlotsSince) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer(parameters, {});
  optimizer.clear_grad();
  write_gradient(parameters[1].tensor, Values(7, 2.0));
  optimizer.stash();
  write_gradient(parameters[1].tensor, Values(7, 1.0));
  EXPECT_NEAR(optimizer.begin_check().read().norm(), 3.0 * std::sqrt(7.0), 1e-6);
  EXPECT_EQ(values(parameters[1].tensor.grad()), Values(7, 3.0));
  optimizer.clear_grad();
  EXPECT_FALSE(any_sum(parameters));
  EXPECT_EQ(optimizer.begin_check().read().norm(), 0.0);
  EXPECT_THROW(optimizer.stash(kReportInf), core::InvalidArgument);
}

TEST(Stash, EachGradientByItsOwnFactor) {
  const NamedTensors parameters = {make_parameter("a", {3}, 1), make_parameter("b", {3}, 2)};
  FusedSGD optimizer(parameters, {});
  for (const NamedTensor& one : parameters) write_gradient(one.tensor, Values(3, 8.0));
  parameters[0].tensor.gradient_slot().mark_written({0, 8.0, nullptr});
  parameters[1].tensor.gradient_slot().mark_written({0, 2.0, nullptr});
  optimizer.stash();
  EXPECT_EQ(values(parameters[0].tensor.grad()), Values(3, 1.0));
  EXPECT_EQ(values(parameters[1].tensor.grad()), Values(3, 4.0));
}

TEST(Stash, KeepsItsMemoryAndItsSumsIfAsked) {
  const NamedTensors parameters = {make_parameter("w", {1000}, 1)};
  FusedSGD optimizer(parameters, {.lr = 1.0});
  write_gradients(parameters, 1);
  const auto gradients = [] {
    return core::memory_stats(core::default_device()).of(core::MemoryCategory::gradients);
  };
  const std::size_t before = gradients();
  optimizer.stash();
  EXPECT_EQ(gradients(), before + 4000);
  const Values start = values(parameters[0].tensor);
  test::expect_applied(optimizer.step({.keep_gradients = true}));
  EXPECT_TRUE(any_sum(parameters));
  test::expect_applied(optimizer.step());
  Values expected = start;
  const Values gradient = test::random_values(1000, 1, -1.0, 1.0);
  for (std::size_t i = 0; i < 1000; ++i) expected[i] -= 2 * static_cast<float>(gradient[i]);
  test::expect_close(parameters[0].tensor, expected, 1e-6, 1e-6);
  const auto allocations = core::memory_stats(core::default_device()).allocations;
  write_gradient(parameters[0].tensor, gradient);
  const auto written = core::memory_stats(core::default_device()).allocations;
  optimizer.stash();
  test::expect_applied(optimizer.step());
  CAIRN_CPU_ONLY("on a GPU lists of pointers take memory");
  EXPECT_EQ(core::memory_stats({}).allocations, written) << written - allocations;
}

}  // namespace
}  // namespace cairn::optim
