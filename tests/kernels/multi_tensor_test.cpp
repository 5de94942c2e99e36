#include "cairn/kernels/multi_tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cairn/core/parallel_for.h"
#include "layouts.h"

namespace cairn::kernels {
namespace {

using test::expect_close;
using test::LaidOut;
using test::Layout;
using test::message_of;
using test::random_values;
using Values = std::vector<double>;

constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};
const std::int64_t kSizes[] = {5, 0, 1, 70000, 64, 200001};

class MultiTensor : public testing::TestWithParam<Device> {
 protected:
  Tensor make(std::int64_t n, DType dtype, std::uint64_t seed, double low = -1,
              double high = 1) const {
    return Tensor::from(random_values(n, seed, low, high), {n}, dtype, GetParam());
  }
};

TEST_P(MultiTensor, CheckGradientsGivesTheNormsOfAMixedList) {
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < std::size(kSizes); ++i)
    tensors.push_back(make(kSizes[i], kDtypes[i % 3], i));
  const LaidOut image(random_values(2 * 3 * 4 * 5, 9), {2, 3, 4, 5}, DType::f32, GetParam(),
                      Layout::channels_last);
  std::vector<TensorView> views(tensors.begin(), tensors.end());
  views.push_back(image);
  const GradientCheck plain = check_gradients(views), detailed = check_gradients(views, true);
  Values squares;
  double total = 0;
  const auto add = [&](const Values& values) {
    double sum = 0;
    for (double v : values) sum += v * v;
    squares.push_back(sum);
    total += sum;
  };
  for (const Tensor& t : tensors) add(t.to_vector());
  add(image.values());
  EXPECT_NEAR(plain.squared_norm, total, 1e-6 * total);
  EXPECT_EQ(plain.squared_norm, detailed.squared_norm);
  EXPECT_TRUE(plain.squared_norms.empty());
  expect_close(detailed.squared_norms, squares, 1e-6, 0);
  EXPECT_EQ(plain.first_nonfinite, -1);
  EXPECT_EQ(plain.nonfinite_count, 0);
}

TEST_P(MultiTensor, CheckGradientsNamesTheFirstCulprit) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  struct Case {
    std::size_t tensor;
    std::vector<double> bad;
    bool is_nan;
  };
  for (DType dtype : kDtypes) {
    for (const Case& c :
         {Case{3, {inf}, false}, Case{5, {inf, nan, -inf}, true}, Case{0, {-inf, -inf}, false}}) {
      std::vector<Tensor> tensors;
      double total = 0;
      for (std::size_t i = 0; i < std::size(kSizes); ++i) {
        Values values = random_values(kSizes[i], i);
        if (i == c.tensor) {
          for (std::size_t k = 0; k < c.bad.size(); ++k) values[values.size() / 2 + k] = c.bad[k];
        }
        tensors.push_back(Tensor::from(values, {kSizes[i]}, dtype, GetParam()));
        for (double v : tensors.back().to_vector()) total += std::isfinite(v) ? v * v : 0.0;
      }
      tensors.push_back(Tensor::full({3}, nan, dtype, GetParam()));  // a later one is not the first
      const GradientCheck check = check_gradients({tensors.begin(), tensors.end()});
      EXPECT_EQ(check.first_nonfinite, static_cast<std::int64_t>(c.tensor));
      EXPECT_EQ(check.nonfinite_count, static_cast<std::int64_t>(c.bad.size()));
      EXPECT_EQ(check.is_nan, c.is_nan);
      EXPECT_NEAR(check.squared_norm, total, 1e-6 * total);
    }
  }
}

TEST_P(MultiTensor, CheckGradientsTakesTheLargestFloatsForWhatTheyAre) {
  const double largest = std::numeric_limits<float>::max();
  const Tensor x = Tensor::full({1000}, largest, DType::f32, GetParam());
  const GradientCheck check = check_gradients({x});
  EXPECT_EQ(check.first_nonfinite, -1);
  EXPECT_NEAR(check.squared_norm / (1000 * largest * largest), 1.0, 1e-6);
  EXPECT_EQ(check_gradients({}).first_nonfinite, -1);
}

TEST(MultiTensorOnThreads, BitsDoNotDependOnTheirNumber) {
  const int before = core::num_threads();
  const Tensor g = Tensor::from(random_values(300001, 1), {300001}, DType::bf16);
  std::vector<double> norms;
  for (int threads : {1, 2, 7}) {
    core::set_num_threads(threads);
    norms.push_back(check_gradients({g, g}).squared_norm);
  }
  core::set_num_threads(before);
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_EQ(norms[0], norms[2]);
}

TEST_P(MultiTensor, ErrorsNameTheTensor) {
  const Tensor w = make(6, DType::f32, 1);
  EXPECT_EQ(message_of([&] {
              check_gradients({w, Tensor::zeros({2}, DType::i32, GetParam())});
            }),
            "[check_gradients] expected gradient 1 of dtype f16, bf16 or f32, got i32");
}

INSTANTIATE_TEST_SUITE_P(Devices, MultiTensor, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels
