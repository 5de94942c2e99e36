// Updates whose learning rate, step, loss scale, clip coefficient and skip flag lie in device
// memory.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/update_scale.h"
#include "support/message_of.h"
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

/// A rule, and the options that the host works out for a step (from 1).
struct RuleCase {
  const char* name;
  UpdateRule device;
  std::function<UpdateRule(double rate, int step, double scale)> host;
  bool bias_correction = true;
};

std::vector<RuleCase> rule_cases() {
  const auto corrected = [](auto options, double rate, int step, double scale) {
    options.lr = rate, options.gradient_scale = scale;
    options.correction1 = 1 - std::pow(options.beta1, step);
    options.correction2 = 1 - std::pow(options.beta2, step);
    return UpdateRule(options);
  };
  const AdamOptions adam{.weight_decay = 0.1};
  const LambOptions lamb{.weight_decay = 0.1};
  const SgdOptions sgd{.momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1};
  const AdagradOptions adagrad{.weight_decay = 0.1, .lr_decay = 0.01};
  const RmsPropOptions rmsprop{.momentum = 0.9, .weight_decay = 0.1};
  return {
      {"adam", adam, [=](double lr, int k, double s) { return corrected(adam, lr, k, s); }},
      {"adam_uncorrected", adam,
       [=](double lr, int, double s) {
         AdamOptions options = adam;
         options.lr = lr, options.gradient_scale = s;
         return UpdateRule(options);
       },
       false},
      {"lamb", lamb, [=](double lr, int k, double s) { return corrected(lamb, lr, k, s); }},
      {"sgd", sgd,
       [=](double lr, int k, double s) {
         SgdOptions options = sgd;
         options.lr = lr, options.gradient_scale = s, options.first_step = k == 1;
         return UpdateRule(options);
       }},
      {"adagrad", adagrad,
       [=](double lr, int k, double s) {
         AdagradOptions options = adagrad;
         options.lr = lr / (1 + (k - 1) * options.lr_decay), options.gradient_scale = s;
         return UpdateRule(options);
       }},
      {"rmsprop", rmsprop,
       [=](double lr, int, double s) {
         RmsPropOptions options = rmsprop;
         options.lr = lr, options.gradient_scale = s;
         return UpdateRule(options);
       }},
  };
}

TEST_P(DeviceSteps, HaveTheBitsOfStepsFromTheHost) {
  for (const RuleCase& rule : rule_cases()) {
    SCOPED_TRACE(rule.name);
    const auto on_device = parameters(), from_host = parameters();
    if (std::holds_alternative<AdagradOptions>(rule.device) ||
        std::holds_alternative<RmsPropOptions>(rule.device)) {  // sums of squares
      for (const auto* all : {&on_device, &from_host}) {
        for (const Parameter& parameter : *all) fill(parameter.moment1.view(), 0.25);
      }
    }
    const Tensor lr = number(0.0, DType::f64), step = number(0, DType::i32), scale = number(1024);
    const Tensor clip = number(0.7, DType::f64);
    const DeviceStep device{.lr = lr,
                            .step = step,
                            .loss_scale = scale,
                            .clip = clip,
                            .bias_correction = rule.bias_correction};
    for (int k = 1; k <= 5; ++k) {
      fill(lr, 0.01 / k);
      advance_step(step, {});
      update(entries_of(on_device), rule.device, device);
      update(entries_of(from_host), rule.host(0.01 / k, k, 1.0 / 1024 * 0.7));
    }
    expect_equal(on_device, from_host);
    EXPECT_EQ(step.item(), 5);
  }
}

TEST_P(DeviceSteps, AnOverflowSkipsAllOfIt) {
  for (const RuleCase& rule : rule_cases()) {
    SCOPED_TRACE(rule.name);
    const auto before = parameters(), after = parameters();
    const Tensor lr = number(0.1, DType::f64), step = number(7, DType::i32), found = number(1);
    const DeviceStep device{.lr = lr, .step = step, .found_inf = found};
    advance_step(step, found);
    update(entries_of(after), rule.device, device);
    expect_equal(before, after);
    EXPECT_EQ(step.item(), 7);
    fill(found, 0.0);
    advance_step(step, found);
    update(entries_of(after), rule.device, device);
    EXPECT_NE(before.back().truth(), after.back().truth());
    EXPECT_EQ(step.item(), 8);
  }
}

// The coefficient is that of torch's clipping, from a norm in double precision.
TEST_P(DeviceSteps, FindNonfiniteClipsByTheNormOfAll) {
  std::vector<Tensor> tensors;
  double squares = 0;
  for (std::int64_t n : {5, 0, 33333, 1}) {
    tensors.push_back(test::random_tensor({n}, DType::bf16, GetParam(), 1));
    for (const double x : tensors.back().to_vector<double>()) squares += x * x;
  }
  const std::vector<TensorView> views(tensors.begin(), tensors.end());
  const Tensor found = number(5), clip = number(0, DType::f64), scale = number(8);
  const Tensor each = Tensor::zeros({4}, DType::f32, GetParam());
  const double norm = std::sqrt(squares) * 0.5 / 8;
  const auto find = [&](double max_norm) {
    find_nonfinite(views, {.found_inf = found,
                           .each = each,
                           .clip = clip,
                           .max_norm = max_norm,
                           .gradient_scale = 0.5,
                           .loss_scale = scale});
  };
  find(norm / 3);
  EXPECT_EQ(found.item(), 0.0);
  EXPECT_NEAR(clip.item(), norm / 3 / (norm + 1e-6), 1e-6);
  find(norm * 3);
  EXPECT_EQ(clip.item(), 1.0);
  fill(views[2].slice(0, 20000, 20001), HUGE_VAL);
  find(norm);
  EXPECT_EQ(found.item(), 1.0);
  EXPECT_EQ(each.to_vector<double>(), (Values{0, 0, 1, 0}));
}

TEST_P(DeviceSteps, FindNonfiniteFindsOneElement) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor found = number(5), each = Tensor::zeros({4}, DType::f32, GetParam());
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (double bad : {inf, -inf, std::nan("")}) {
      for (std::int64_t at : {0, 12, 17000, 33332}) {
        std::vector<Tensor> tensors;
        for (std::int64_t n : {5, 0, 33333, 1}) {
          tensors.push_back(test::random_tensor({n}, dtype, GetParam(), 1));
        }
        const std::vector<TensorView> views(tensors.begin(), tensors.end());
        find_nonfinite(views, {found, each});
        EXPECT_EQ(found.item(), 0.0);
        fill(views[2].slice(0, at, at + 1), bad);
        find_nonfinite(views, {found, each});
        EXPECT_EQ(found.item(), 1.0);
        EXPECT_EQ(each.to_vector<double>(), (Values{0, 0, 1, 0}));
        fill(each, 0.0);
      }
    }
  }
  find_nonfinite({}, {found});
  EXPECT_EQ(found.item(), 0.0);
}

// Check, update and loss scale without the host, as a graph would repeat them.
TEST_P(DeviceSteps, AWholeTrainingStepNeedsNoHost) {
  const Tensor lr = number(0.01, DType::f64), step = number(0, DType::i32), scale = number(65536);
  const Tensor found = number(0), growth = number(0, DType::i32),
               hysteresis = number(1, DType::i32);
  const auto parameter = make_parameter(all_mixes().back(), 333, GetParam(), 2, 1);
  const UpdateEntry entry = parameter.entry();
  const std::int64_t reads = host_reads();
  for (int k = 0; k < 6; ++k) {
    const bool overflow = k == 2 || k == 3;
    fill(entry.gradient.slice(0, 100, 101), overflow ? HUGE_VAL : 0.5);
    find_nonfinite({entry.gradient}, {found});
    advance_step(step, found);
    update({entry}, AdamOptions{},
           {.lr = lr, .step = step, .loss_scale = scale, .found_inf = found});
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
  const Tensor lr = number(0.1, DType::f64), step = number(0, DType::i32);
  const auto one = [&](const UpdateRule& rule, const DeviceStep& device) {
    return message_of([&] { update({p.entry()}, rule, device); });
  };
  EXPECT_EQ(one(AdamOptions{}, {.lr = lr}),
            "[adam_update] expected a step in device memory, got none");
  EXPECT_EQ(one(SgdOptions{}, {.lr = lr, .step = lr}),
            core::str("[sgd_update] expected a step of one i32 on ", GetParam(),
                      ", got shape [1] of f64 on ", GetParam()));
  EXPECT_THROW(update({p.entry()}, NovoGradOptions{}, {.lr = lr, .step = step}), core::Unsupported);
  other.l2 = 0.5;
  EXPECT_EQ(message_of([&] {
              update({p.entry(), other}, AdamOptions{}, {.lr = lr, .step = step});
            }),
            "[adam_update] expected one gradient_factor and l2 for all entries of a device step, "
            "got 1 and 0.5 in entry 1");
  EXPECT_EQ(message_of([&] { find_nonfinite({lr}, {.found_inf = number(0), .clip = lr}); }),
            "[find_nonfinite] expected a max_norm > 0 to clip by, got 0");
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceSteps, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
