// Adam with its learning rate, step, loss scale and skip flag in device memory.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/update_scale.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::all_mixes;
using test::entries_of;
using test::make_parameter;
using test::message_of;
using test::Mix;
using test::Parameter;
using test::Values;

class DeviceSteps : public testing::TestWithParam<Device> {
 protected:
  Tensor number(double value, DType dtype = DType::f32) const {
    return Tensor::full({1}, value, dtype, GetParam());
  }
  std::vector<Parameter> parameters() const {
    std::vector<Parameter> all;
    for (std::int64_t n : {0, 1, 37, 20001}) {
      for (const Mix& mix : all_mixes()) {
        if (n < 20001 || mix.gradient == DType::bf16) {
          all.push_back(make_parameter(mix, n, GetParam(), 2, all.size() % 2 == 0 ? 0 : 5));
        }
      }
    }
    return all;
  }
  static void expect_equal(const std::vector<Parameter>& a, const std::vector<Parameter>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].truth(), b[i].truth()) << a[i].name;
      EXPECT_EQ(a[i].moment1.values(), b[i].moment1.values()) << a[i].name;
      EXPECT_EQ(a[i].moment2.values(), b[i].moment2.values()) << a[i].name;
    }
  }
};

TEST_P(DeviceSteps, HaveTheBitsOfStepsFromTheHost) {
  for (bool corrected : {true, false}) {
    const auto on_device = parameters(), from_host = parameters();
    const Tensor lr = number(0.0), step = number(0, DType::i32), scale = number(1024);
    const AdamOptions device{
        .weight_decay = 0.1,
        .device = {.lr = lr, .step = step, .loss_scale = scale, .bias_correction = corrected}};
    for (int k = 1; k <= 5; ++k) {
      const auto rate = static_cast<double>(static_cast<float>(0.01 / k));
      fill(lr, rate);
      AdamOptions host{.lr = rate, .weight_decay = 0.1, .gradient_scale = 1.0 / 1024};
      if (corrected)
        host.correction1 = 1 - std::pow(0.9, k), host.correction2 = 1 - std::pow(0.999, k);
      update(entries_of(on_device), device);
      update(entries_of(from_host), host);
    }
    expect_equal(on_device, from_host);
    EXPECT_EQ(step.item(), 5);
  }
}

TEST_P(DeviceSteps, AnOverflowSkipsAllOfIt) {
  const auto before = parameters(), after = parameters();
  const Tensor lr = number(0.1), step = number(7, DType::i32), found = number(1);
  update(entries_of(after), AdamOptions{.device = {.lr = lr, .step = step, .found_inf = found}});
  expect_equal(before, after);
  EXPECT_EQ(step.item(), 7);
  fill(found, 0.0);
  update(entries_of(after), AdamOptions{.device = {.lr = lr, .step = step, .found_inf = found}});
  EXPECT_NE(before.back().truth(), after.back().truth());
  EXPECT_EQ(step.item(), 8);
}

TEST_P(DeviceSteps, FindNonfiniteFindsOneElement) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor found = number(5);
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (double bad : {inf, -inf, std::nan("")}) {
      for (std::int64_t at : {0, 12, 17000, 33332}) {
        std::vector<Tensor> tensors;
        for (std::int64_t n : {5, 0, 33333, 1}) {
          tensors.push_back(test::random_tensor({n}, dtype, GetParam(), 1));
        }
        const std::vector<TensorView> views(tensors.begin(), tensors.end());
        find_nonfinite(views, found);
        EXPECT_EQ(found.item(), 0.0);
        fill(views[2].slice(0, at, at + 1), bad);
        find_nonfinite(views, found);
        EXPECT_EQ(found.item(), 1.0);
      }
    }
  }
  find_nonfinite({}, found);
  EXPECT_EQ(found.item(), 0.0);
}

// Check, update and loss scale without the host, as a graph would repeat them.
TEST_P(DeviceSteps, AWholeTrainingStepNeedsNoHost) {
  const Tensor lr = number(0.01), step = number(0, DType::i32), scale = number(65536);
  const Tensor found = number(0), growth = number(0, DType::i32),
               hysteresis = number(1, DType::i32);
  const auto parameter = make_parameter(all_mixes().back(), 333, GetParam(), 2, 1);
  const UpdateEntry entry = parameter.entry();
  const std::int64_t reads = host_reads();
  for (int k = 0; k < 6; ++k) {
    const bool overflow = k == 2 || k == 3;
    fill(entry.gradient.slice(0, 100, 101), overflow ? HUGE_VAL : 0.5);
    find_nonfinite({entry.gradient}, found);
    update(
        {entry},
        AdamOptions{.device = {.lr = lr, .step = step, .loss_scale = scale, .found_inf = found}});
    update_scale(scale, growth, hysteresis, found, {.growth_interval = 2});
  }
  EXPECT_EQ(host_reads(), reads);
  EXPECT_EQ(step.item(), 4);
  EXPECT_EQ(scale.item(), 65536.0 * 2 / 4 * 2);
  for (double w : parameter.truth()) EXPECT_TRUE(std::isfinite(w));
}

TEST_P(DeviceSteps, ErrorsSayWhatIsMissing) {
  const auto p = make_parameter(all_mixes().front(), 5, GetParam(), 2, 0);
  UpdateEntry other = make_parameter(all_mixes().front(), 5, GetParam(), 2, 0).entry();
  const Tensor lr = number(0.1), step = number(0, DType::i32);
  EXPECT_EQ(message_of([&] { update({p.entry()}, AdamOptions{.device = {.lr = lr}}); }),
            "[adam_update] expected a step in device memory, got none");
  EXPECT_EQ(message_of([&] { update({p.entry()}, AdamOptions{.device = {.lr = lr, .step = lr}}); }),
            core::str("[adam_update] expected a step of one i32 on ", GetParam(),
                      ", got shape [1] of f32 on ", GetParam()));
  other.l2 = 0.5;
  EXPECT_EQ(message_of([&] {
              update({p.entry(), other}, AdamOptions{.device = {.lr = lr, .step = step}});
            }),
            "[adam_update] expected one gradient_factor and l2 for all entries of a device step, "
            "got 1 and 0.5 in entry 1");
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceSteps, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
