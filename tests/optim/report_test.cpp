// What checks report, and gradients gathered from several backwards.
#include "cairn/optim/report.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "support.h"
#include "support/cpu_only.h"

namespace cairn::optim {
namespace {

using test::joined;
using test::less;
using test::norm_of;
using testing::HasSubstr;

NamedTensors report_three(Device device = core::default_device()) {
  return {make_parameter("a", {3, 5}, 1, DType::f16, device),
          make_parameter("b", {7}, 2, DType::bf16, device),
          make_parameter("c", {4}, 3, DType::f32, device)};
}

TEST(Report, NamesEveryParameterThatIsNotFinite) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer({{{parameters[0]}, 0.1, 0}, {{parameters[1], parameters[2]}, 0.1, 0}}, {});
  write_gradients(parameters, 1);
  Values bad(7, 1.0), worse(4, -kInf);
  bad[1] = kNaN, bad[3] = kInf, bad[4] = kNaN;
  write_gradient(parameters[1].tensor, bad);
  write_gradient(parameters[2].tensor, worse);
  const GradientReport report = optimizer.begin_check().read();
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> found;
  for (const auto& one : report.nonfinite) found.emplace_back(one.parameter, one.inf, one.nan);
  EXPECT_THAT(found, testing::ElementsAre(std::tuple("b", 1, 2), std::tuple("c", 4, 0)));
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
  for (const double type : {2.0, 1.0, 3.5, kInf}) {
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
  EXPECT_THROW(optimizer.begin_check(2.0).read().norms_of(kInf), core::InvalidArgument);
  EXPECT_THROW(GradientReport().norms_of(2.0), core::InvalidArgument);
  EXPECT_THROW(optimizer.begin_check(0.5).read(), core::InvalidArgument);
  EXPECT_THROW(optimizer.begin_check(kNaN).read(), core::InvalidArgument);
}

TEST(Report, SeveralOptimizersAreReadTogetherAndWaitOnce) {
  const NamedTensors parameters = report_three();
  FusedSGD first({parameters[0], parameters[1]}, {});
  FusedAdam second({parameters[2]});
  write_gradients(parameters, 1);
  write_gradient(parameters[2].tensor, Values(4, kNaN));
  const double alone = first.begin_check().read().squared_norm;
  const std::int64_t waits = kernels::host_reads();
  const auto reports = PendingReport::read({first.begin_check(), second.begin_check()});
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_TRUE(reports[0].finite());
  EXPECT_EQ(reports[1].culprit, "c");
  EXPECT_EQ(reports[0].squared_norm, alone);
  expect_applied(first.update(reports[0], {}));
  EXPECT_FALSE(second.skip(reports[1], {}).applied);
  EXPECT_EQ(kernels::host_reads(), waits + 1);
  EXPECT_TRUE(PendingReport::read(std::vector<PendingReport>{}).empty());
}

TEST(Clipping, ByEveryTypeOfNorm) {
  for (const double type : {2.0, 1.0, 3.5, kInf}) {
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
    write_gradients(parameters, 5, 1e-3);
    EXPECT_EQ(optimizer.step({.max_gradient_norm = 0.5, .norm_type = type}).clip_coefficient, 1.0);
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
  test::expect_close(parameters[0].tensor, less(a, 0.25), 1e-6, 1e-6);
  test::expect_close(parameters[1].tensor, less(b, 2.0 * 1.5 / (6.0 + 1e-6)), 1e-6, 1e-6);
}

TEST(Clipping, NonFiniteGradientsAreAnErrorIfAsked) {
  const NamedTensors parameters = report_three();
  FusedSGD optimizer(parameters, {});
  write_gradients(parameters, 1);
  write_gradient(parameters[1].tensor, Values(7, kInf));
  write_gradient(parameters[2].tensor, Values(4, kNaN));
  const Values before = values(parameters[0].tensor);
  for (const bool check : {true, false}) {
    const StepOptions options{.check = check, .max_gradient_norm = 1.0, .error_if_nonfinite = true};
    EXPECT_THAT(message_of<core::Error>([&] { (void)optimizer.step(options); }),
                HasSubstr("got inf in the gradient of b (7 elements) and 1 more parameter"));
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
  EXPECT_THROW((void)optimizer.step({.gradient_scale = kInf}), core::InvalidArgument);
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
  const NamedTensors parameters = report_three(GetParam());
  const Tensor &a = parameters[0].tensor, &b = parameters[1].tensor, &c = parameters[2].tensor;
  FusedSGD optimizer(parameters, {.lr = 0.5});
  EXPECT_FALSE(any_sum(parameters));
  const std::vector<Values> before = values(parameters);
  write_gradient(a, Values(15, 8.0));
  write_gradient(c, Values(4, 16.0));
  EXPECT_TRUE(optimizer.stash(1.0 / 8).read().finite());
  EXPECT_TRUE(any_sum(parameters));
  EXPECT_EQ(values(a.grad()), Values(15, 1.0));  // the sum
  write_gradient(a, Values(15, 1.0));
  EXPECT_THROW(a.grad(), core::InvalidArgument);
  write_gradient(b, Values(7, 3.0));
  EXPECT_TRUE(optimizer.stash(1.0 / 4096).read().finite());

  const Values sums = {1.0 + 1.0 / 4096, 3.0 / 4096, 2.0};  // the first is no f16
  const StepResult result = optimizer.step();
  EXPECT_NEAR(result.gradient_norm,
              std::sqrt(15 * sums[0] * sums[0] + 7 * sums[1] * sums[1] + 4 * 4.0), 1e-5);
  for (std::size_t i = 0; i < 3; ++i) {
    test::expect_close(exact(parameters[i].tensor), less(before[i], 0.5 * sums[i]), 1e-7, 1e-7);
  }
  EXPECT_FALSE(any_sum(parameters));
}

TEST_P(StashOnDevice, ChecksWhatItMoves) {
  const NamedTensors parameters = {make_parameter("a", {3}, 1, DType::f16, GetParam()),
                                   make_parameter("b", {3}, 2, DType::f32, GetParam())};
  FusedSGD optimizer(parameters, {});
  write_gradients(parameters, 1);
  (void)optimizer.stash(1.0);
  write_gradients(parameters, 1);
  write_gradient(parameters[0].tensor, {1.0, kInf, 1e9});
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
  (void)optimizer.stash();
  write_gradient(parameters[1].tensor, Values(7, 1.0));
  EXPECT_NEAR(optimizer.begin_check().read().norm(), 3.0 * std::sqrt(7.0), 1e-6);
  EXPECT_EQ(values(parameters[1].tensor.grad()), Values(7, 3.0));
  optimizer.clear_grad();
  EXPECT_FALSE(any_sum(parameters));
  EXPECT_EQ(optimizer.begin_check().read().norm(), 0.0);
  EXPECT_THROW((void)optimizer.stash(kInf), core::InvalidArgument);
}

TEST(Stash, EachGradientByItsOwnFactor) {
  const NamedTensors parameters = {make_parameter("a", {3}, 1), make_parameter("b", {3}, 2)};
  FusedSGD optimizer(parameters, {});
  for (const NamedTensor& one : parameters) write_gradient(one.tensor, Values(3, 8.0));
  parameters[0].tensor.gradient_slot().mark_written({0, 8.0, nullptr});
  parameters[1].tensor.gradient_slot().mark_written({0, 2.0, nullptr});
  (void)optimizer.stash();
  EXPECT_EQ(values(parameters[0].tensor.grad()), Values(3, 1.0));
  EXPECT_EQ(values(parameters[1].tensor.grad()), Values(3, 4.0));
}

TEST(Stash, KeepsItsMemoryAndItsSumsIfAsked) {
  const NamedTensors parameters = {make_parameter("w", {1000}, 1)};
  FusedSGD optimizer(parameters, {.lr = 1.0});
  write_gradients(parameters, 1);
  const auto gradients = [] { return test::bytes_of(core::MemoryCategory::gradients); };
  const std::size_t before = gradients();
  (void)optimizer.stash();
  EXPECT_EQ(gradients(), before + 4000);
  Values expected = values(parameters[0].tensor);
  expect_applied(optimizer.step({.keep_gradients = true}));
  EXPECT_TRUE(any_sum(parameters));
  expect_applied(optimizer.step());
  const Values gradient = test::random_values(1000, 1);
  for (std::size_t i = 0; i < 1000; ++i) expected[i] -= 2 * static_cast<float>(gradient[i]);
  test::expect_close(parameters[0].tensor, expected, 1e-6, 1e-6);
  write_gradient(parameters[0].tensor, gradient);
  const auto written = core::memory_stats(core::default_device()).allocations;
  (void)optimizer.stash();
  expect_applied(optimizer.step());
  CAIRN_CPU_ONLY("on a GPU lists of pointers take memory");
  EXPECT_EQ(core::memory_stats({}).allocations, written);
}

}  // namespace
}  // namespace cairn::optim
