// check_tensors and what is read from it, against sums in double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <future>
#include <limits>
#include <stdexcept>

#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/passing_lists.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using Checks = std::vector<TensorCheck>;

const bool kTwoDevices = ::setenv("CAIRN_CPU_DEVICES", "2", /*overwrite=*/1) == 0;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kPowers[] = {1.0, 2.0, 2.5, 7.0, kInf};
constexpr DType kCheckTensorsDtypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr std::int64_t kSizes[] = {5, 0, 1, 70000, 64, 131072, 600001, 17};

TensorCheck expected_check(const std::vector<double>& values, double p) {
  TensorCheck check;
  for (double v : values) {
    if (!std::isfinite(v)) {
      ++check.nonfinite;
      check.nan += std::isnan(v);
    } else if (std::isinf(p)) {
      check.power_sum = std::max(check.power_sum, std::abs(v));
    } else {
      check.power_sum += std::pow(std::abs(v), p);
    }
  }
  return check;
}

void expect_check(const TensorCheck& actual, const TensorCheck& expected) {
  EXPECT_NEAR(actual.power_sum, expected.power_sum, 1e-10 * std::abs(expected.power_sum));
  EXPECT_EQ(actual.nonfinite, expected.nonfinite);
  EXPECT_EQ(actual.nan, expected.nan);
}

class CheckTensors : public testing::TestWithParam<Device> {
 protected:
  Tensor make(const std::vector<double>& values, DType dtype) const {
    return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, dtype, GetParam());
  }
  void expect_checks(const std::vector<Tensor>& tensors, double p) const {
    const Checks checks = check_tensors({tensors.begin(), tensors.end()}, p).read();
    ASSERT_EQ(checks.size(), tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      SCOPED_TRACE(core::str("p ", p, ", tensor ", i));
      expect_check(checks[i], expected_check(tensors[i].to_vector(), p));
    }
  }
};

// A GPU's pointer tables.
TEST_P(CheckTensors, ListsThatPassLeaveNoMemoryBehind) {
  const Tensor x = make(random_values(1000, 1), DType::f32);
  const auto standing = [] { return core::memory_stats(GetParam()).current_total; };
  const auto checked = [&] { return check_tensors({x}).read().front().power_sum; };
  const std::size_t before = standing();
  double sum = 0;
  {
    const PassingLists outer;
    {
      const PassingLists inner;
      sum = checked();
    }
    EXPECT_EQ(standing(), before);
    EXPECT_EQ(checked(), sum);
    EXPECT_EQ(checked(), sum);
  }
  EXPECT_EQ(standing(), before);
  EXPECT_EQ(checked(), sum);
  const std::size_t kept = standing();
  EXPECT_EQ(kept > before, GetParam().is_cuda());
  EXPECT_EQ(checked(), sum);
  EXPECT_EQ(standing(), kept);
}

TEST_P(CheckTensors, SumsPowersOfEveryTensorOfAMixedList) {
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < std::size(kSizes); ++i) {
    tensors.push_back(make(random_values(kSizes[i], i), kCheckTensorsDtypes[i % 3]));
  }
  for (double p : kPowers) expect_checks(tensors, p);
}

TEST_P(CheckTensors, CountsInfAndNanOfEveryTensor) {
  const double nan = std::nan("");
  for (DType dtype : kCheckTensorsDtypes) {
    std::vector<Tensor> tensors;
    for (std::int64_t n : {std::int64_t{1}, std::int64_t{3}, std::int64_t{70001}}) {
      for (const std::vector<double>& bad :
           {std::vector<double>{}, {kInf}, {nan}, {-kInf, nan, kInf}}) {
        if (static_cast<std::int64_t>(bad.size()) > n) continue;
        std::vector<double> values = random_values(n, 3);
        std::copy(bad.begin(), bad.end(), values.end() - static_cast<std::ptrdiff_t>(bad.size()));
        tensors.push_back(make(values, dtype));
      }
    }
    for (double p : kPowers) expect_checks(tensors, p);
  }
}

TEST_P(CheckTensors, FindsABadElementAtAnyPlace) {
  const std::int64_t n = 300;
  for (DType dtype : kCheckTensorsDtypes) {
    for (std::int64_t at = 0; at < n; at += 7) {
      std::vector<double> values(n, 0.5);
      values[static_cast<std::size_t>(at)] = at % 2 == 0 ? -kInf : std::nan("");
      for (double p : {1.0, 2.0, kInf}) {
        const TensorCheck check = check_tensors({make(values, dtype)}, p).read()[0];
        EXPECT_EQ(check.nonfinite, 1) << at;
        EXPECT_EQ(check.nan, at % 2) << at;
      }
    }
  }
}

TEST_P(CheckTensors, TakesViewsAtEveryAlignment) {
  for (DType dtype : kCheckTensorsDtypes) {
    const Tensor whole = make(random_values(3000, 5), dtype);
    std::vector<Tensor> parts;
    for (std::int64_t offset = 0; offset < 8; ++offset) {
      parts.push_back(whole.alias(whole.view().slice(0, offset, 3000 - 3 * offset)));
    }
    for (double p : {1.0, 2.0, kInf}) expect_checks(parts, p);
  }
}

TEST_P(CheckTensors, TakesDenseViewsOfAnyLayout) {
  const Shape shape{2, 3, 4, 5};
  const std::vector<double> values = random_values(shape.numel(), 9);
  const LaidOut image(values, shape, DType::f32, GetParam(), Layout::channels_last);
  const LaidOut turned(values, shape, DType::f16, GetParam(), Layout::transposed);
  const Checks checks = check_tensors({image, turned}).read();
  expect_check(checks[0], expected_check(image.values(), 2));
  expect_check(checks[1], expected_check(turned.values(), 2));
}

TEST_P(CheckTensors, TheLargestFloatsAreFinite) {
  const double largest = std::numeric_limits<float>::max();
  const Tensor x = Tensor::full({1000}, -largest, DType::f32, GetParam());
  for (double p : {1.0, 2.0, 7.0, kInf}) {
    const Checks checks = check_tensors({x}, p).read();
    EXPECT_EQ(checks[0].nonfinite, 0);
    EXPECT_NEAR(norm_of(checks, p) / (largest * (std::isinf(p) ? 1 : std::pow(1000, 1 / p))), 1.0,
                1e-12);
  }
}

TEST_P(CheckTensors, NormOfJoinsTheTensors) {
  const std::vector<double> a = random_values(1000, 1), b = random_values(77, 2, -3, 3);
  std::vector<double> all = make(a, DType::f32).to_vector();
  for (double v : make(b, DType::bf16).to_vector()) all.push_back(v);
  for (double p : kPowers) {
    const Checks checks = check_tensors({make(a, DType::f32), make(b, DType::bf16)}, p).read();
    const double sum = expected_check(all, p).power_sum;
    const double norm = std::isinf(p) ? sum : std::pow(sum, 1 / p);
    EXPECT_NEAR(norm_of(checks, p), norm, 1e-10 * norm) << p;
  }
  EXPECT_EQ(norm_of({}), 0.0);
}

TEST_P(CheckTensors, ReadsSeveralWithOneWait) {
  const Tensor x = make(random_values(1000, 1), DType::f32),
               y = make(random_values(10, 2), DType::bf16);
  const PendingCheck first = check_tensors({x, y}), second = check_tensors({y}), none;
  EXPECT_EQ(first.size(), 2u);
  EXPECT_EQ(none.size(), 0u);
  const std::int64_t before = host_reads();
  const auto checks = PendingCheck::read({first, none, second});
  EXPECT_EQ(host_reads(), before + 1);
  ASSERT_EQ(checks.size(), 3u);
  EXPECT_EQ(checks[0][1].power_sum, checks[2][0].power_sum);
  EXPECT_TRUE(checks[1].empty());
  EXPECT_EQ(first.read()[0].power_sum, checks[0][0].power_sum);  // kept on the host
  EXPECT_TRUE(check_tensors({}).read().empty());
  EXPECT_EQ(host_reads(), before + 1);
}

TEST_P(CheckTensors, SeesTheTensorsAsTheyWereAtTheLaunch) {
  const Tensor x = Tensor::full({100}, 2.0, DType::f32, GetParam());
  const PendingCheck check = check_tensors({x});
  core::copy_bytes(Tensor::full({100}, 5.0, DType::f32, GetParam()), x);
  EXPECT_EQ(check.read()[0].power_sum, 400.0);
}

TEST_P(CheckTensors, ErrorsNameTheTensor) {
  const Tensor x = make({1, 2, 3}, DType::f32);
  EXPECT_EQ(message_of([&] {
              (void)check_tensors({x, Tensor::zeros({2}, DType::f64, GetParam())});
            }),
            "[check_tensors] expected tensor 1 of dtype f16, bf16 or f32, got f64");
  EXPECT_EQ(message_of([&] {
              (void)check_tensors({x, TensorView()});
            }),
            "[check_tensors] expected a defined tensor 1, got an undefined view");
  EXPECT_THAT(
      message_of([&] {
        (void)check_tensors({x, Tensor::zeros({4, 4}, DType::f32, GetParam()).view().select(1, 0)});
      }),
      testing::HasSubstr("expected a dense tensor 1"));
  for (double p : {0.5, -1.0, std::nan("")}) {
    EXPECT_THAT(message_of([&] { (void)check_tensors({x}, p); }),
                testing::HasSubstr("[check_tensors] expected p >= 1"));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CheckTensors, testing::ValuesIn(test::devices()),
                         test::device_name);

/// A stream whose work waits until it is let go.
class HeldStream {
 public:
  HeldStream() : stream_(core::Stream::create(Device{})) {
    stream_.submit([opened = opened_.get_future().share()] { opened.wait(); });
  }
  ~HeldStream() { open(); }
  const core::Stream& stream() const { return stream_; }
  void open() {
    if (!open_) opened_.set_value();
    open_ = true;
  }

 private:
  std::promise<void> opened_;
  bool open_ = false;
  core::Stream stream_;
};

TEST(CheckTensorsOnStreams, RunsInOrderAndIsReadLater) {
  HeldStream held;
  const Tensor x = Tensor::full({1000}, 1.0), y = Tensor::full({1000}, 3.0);
  PendingCheck check;
  {
    const core::StreamGuard guard(held.stream());
    core::copy_bytes(y, x);
    check = check_tensors({x});
  }
  held.open();
  EXPECT_EQ(check.read()[0].power_sum, 9000.0);
}

TEST(CheckTensorsOnStreams, MayBeDroppedBeforeItRuns) {
  HeldStream held;
  const Tensor x = Tensor::full({1000}, 1.0);
  {
    const core::StreamGuard guard(held.stream());
    (void)check_tensors({x});
  }
  held.open();
  held.stream().synchronize();
}

TEST(CheckTensorsOnStreams, ReadRethrowsTheErrorBeforeIt) {
  const core::Stream stream = core::Stream::create(Device{});
  const Tensor x = Tensor::full({10}, 1.0);
  const auto launch_after_an_error = [&] {
    stream.submit([] { throw std::runtime_error("the work before failed"); });
    const core::StreamGuard guard(stream);
    return check_tensors({x});
  };
  EXPECT_EQ(message_of<std::runtime_error>([&] { launch_after_an_error().read(); }),
            "the work before failed");

  const PendingCheck reported = launch_after_an_error();
  EXPECT_THROW(stream.synchronize(), std::runtime_error);
  EXPECT_THAT(message_of<core::DeviceError>([&] { reported.read(); }),
              testing::HasSubstr("the pass did not run"));
}

TEST(CheckTensorsOnDevices, AListIsOfOneDeviceAndReadingWaitsOnceForEach) {
  ASSERT_TRUE(kTwoDevices);
  const Device other{core::DeviceType::cpu, 1};
  const Tensor here = Tensor::full({10}, 1.0), there = Tensor::full({10}, 2.0, DType::f32, other);
  EXPECT_EQ(message_of([&] {
              (void)check_tensors({here, here, there});
            }),
            "[check_tensors] expected every tensor on cpu:0, the device of the first, got tensor 2 "
            "on cpu:1");
  const std::int64_t before = host_reads();
  const auto checks = PendingCheck::read(
      {check_tensors({here}), check_tensors({there}), check_tensors({here, here})});
  EXPECT_EQ(host_reads(), before + 2);
  EXPECT_EQ(checks[1][0].power_sum, 40.0);
  EXPECT_EQ(checks[2][1].power_sum, 10.0);
}

TEST(CheckTensorsOnThreads, BitsDoNotDependOnTheirNumber) {
  const int before = core::num_threads();
  const Tensor x = Tensor::from(random_values(300001, 1), {300001}, DType::bf16);
  for (double p : kPowers) {
    std::vector<double> sums;
    for (int threads : {1, 2, 7}) {
      core::set_num_threads(threads);
      sums.push_back(check_tensors({x}, p).read()[0].power_sum);
    }
    EXPECT_EQ(sums[0], sums[1]);
    EXPECT_EQ(sums[0], sums[2]);
  }
  core::set_num_threads(before);
}

}  // namespace
}  // namespace cairn::kernels
