// Operations that are made of others: PyTorch's values, loops of their formulas, central
// differences.
#include <gmock/gmock.h>

#include <functional>
#include <map>
#include <string>

#include "autograd/gradient_check.h"
#include "support/tensors.h"

namespace cairn::autograd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Values = std::vector<double>;

struct Curve {
  const char* name;
  Tensor (*f)(const Tensor& x);
  Values y, dx;  // PyTorch 2.15's, f64
};

const Values kX = {-30, -3, -1, -0.25, 0, 0.5, 2, 25};

class Curves : public ::testing::TestWithParam<Curve> {};

TEST_P(Curves, HavePyTorchsValuesAndSlopes) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor x = Tensor::from(kX, {8}, dtype).set_requires_grad(true);
    const Tensor y = GetParam().f(x);
    EXPECT_EQ(y.dtype(), dtype);
    backward(sum(y));
    const double tolerance = dtype == DType::f64 ? 1e-9 : dtype == DType::f32 ? 2e-6 : 0x1p-7;
    expect_close(y, GetParam().y, tolerance);
    expect_close(x.grad(), GetParam().dx, tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, Curves,
    ::testing::Values(
        Curve{"elu",
              [](const Tensor& x) { return elu(x, 1.5); },
              {-1.5, -1.425319397, -0.9481808382, -0.3317988254, 0, 0.5, 2, 25},
              {1.403643445e-13, 0.07468060255, 0.5518191618, 1.168201175, 1.5, 1, 1, 1}},
        Curve{"softplus",
              softplus,
              {9.357622969e-14, 0.04858735157, 0.3132616875, 0.5759394199, 0.6931471806,
               0.9740769842, 2.126928011, 25},
              {9.357622969e-14, 0.04742587318, 0.2689414214, 0.4378234991, 0.5, 0.6224593312,
               0.880797078, 1}},
        Curve{"mish",
              mish,
              {-2.807286891e-12, -0.1456474613, -0.3034014614, -0.1299269637, 0, 0.3752452113,
               1.94395896, 25},
              {-2.713710661e-12, -0.09339311453, 0.05921675588, 0.4398156017, 0.6, 0.8864243754,
               1.069317934, 1}},
        Curve{"prelu",
              [](const Tensor& x) { return prelu(x, Tensor::full({1}, 0.2, x.dtype())); },
              {-6, -0.6, -0.2, -0.05, 0, 0.5, 2, 25},
              {0.2, 0.2, 0.2, 0.2, 0.2, 1, 1, 1}}),
    [](const auto& info) { return info.param.name; });

TEST(ComposedOps, HaveGradients) {
  const auto x = [] { return leaf({2, 3, 4}, 1); };
  check_gradients([](const Tensors& in) { return min(in[0], {1}); }, {x()});
  check_gradients([](const Tensors& in) { return var(in[0], {0, 2}); }, {x()});
  check_gradients([](const Tensors& in) { return sort(in[0]).values; }, {x()});
  check_gradients([](const Tensors& in) { return tril(in[0], 1); }, {x()});
  check_gradients([](const Tensors& in) { return pad(in[0], 1, 2, 1, 5.0); }, {x()});
  check_gradients([](const Tensors& in) { return concat(split(in[0], 3, 2), 1); },
                  {leaf({2, 3, 6}, 2)});
  check_gradients([](const Tensors& in) { return flip(in[0], 1); }, {x()});
  check_gradients([](const Tensors& in) { return norm(in[0], {0, 2}); }, {x()});
  const Tensor places = Tensor::from<std::int64_t>({2, 0, 2, 2, 1}, {5});
  check_gradients([&](const Tensors& in) { return index_select(in[0], 1, places); }, {x()});
  const Tensor rows = Tensor::from<std::int64_t>({2, 0, 2, 1, 3, 3}, {2, 3});
  check_gradients([&](const Tensors& in) { return scatter_add(in[0], rows, in[1]); },
                  {leaf({2, 4}, 5), leaf({2, 3}, 6)});
  check_gradients([](const Tensors& in) { return prelu(in[0], in[1]); }, {x(), leaf({4}, 3)});
  check_gradients([](const Tensors& in) { return einsum("abc,dca->bd", in); },
                  {x(), leaf({5, 4, 2}, 4)});
}

TEST(ComposedOps, HaveTheirShapesAndValues) {
  const Tensor x = Tensor::from(Values{3, 1, 2, 6, 5, 4}, {2, 3});
  EXPECT_THAT(min(x, {1}).to_vector(), ElementsAre(1, 4));
  EXPECT_THAT(var(x, {1}).to_vector(), ElementsAre(1, 1));
  EXPECT_NEAR(var(x, {1}, true, 0).to_vector()[0], 2.0 / 3, 1e-12);
  EXPECT_THAT(sort(x).values.to_vector(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(sort(x, true).index.to_vector(), ElementsAre(0, 2, 1, 0, 1, 2));
  EXPECT_EQ(unsqueeze(x, -1).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(unsqueeze(x, 1).shape(), (Shape{2, 1, 3}));
  EXPECT_EQ(squeeze(unsqueeze(x, 1), 1).to_vector(), x.to_vector());
  EXPECT_THAT(pad(x, 1, 1, 2, 9).to_vector(), ElementsAre(9, 3, 1, 2, 9, 9, 9, 6, 5, 4, 9, 9));
  const std::vector<Tensor> parts = split(x, 2, 1);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_THAT(parts[1].to_vector(), ElementsAre(2, 4));
  EXPECT_THAT(arange(2, 5).to_vector(), ElementsAre(2, 3, 4));
  EXPECT_THAT(one_hot(Tensor::from<std::int64_t>({2, 0}, {2}), 3).to_vector(),
              ElementsAre(0, 0, 1, 1, 0, 0));
  EXPECT_THAT(tril(x).to_vector(), ElementsAre(3, 0, 0, 6, 5, 0));
  EXPECT_THAT(triu(x, 1).to_vector(), ElementsAre(0, 1, 2, 0, 0, 4));
  EXPECT_THAT(masked_fill(x, gt(x, Tensor::full({}, 4.0, DType::f64)), -1).to_vector(),
              ElementsAre(3, 1, 2, -1, -1, 4));
}

TEST(ComposedOps, MoveValues) {
  const Tensor x = Tensor::from(Values{3, 1, 2, 6, 5, 4}, {2, 3});
  EXPECT_THAT(flip(x, -1).to_vector(), ElementsAre(2, 1, 3, 4, 5, 6));
  EXPECT_THAT(flip(x, 0).to_vector(), ElementsAre(6, 5, 4, 3, 1, 2));
  const Tensor places = Tensor::from<std::int64_t>({2, 2, 0, 1}, {4});
  const Tensor chosen = index_select(x, 1, places);
  EXPECT_EQ(chosen.shape(), (Shape{2, 4}));
  EXPECT_THAT(chosen.to_vector(), ElementsAre(2, 2, 3, 1, 4, 4, 6, 5));
  EXPECT_EQ(flip(Tensor::zeros({0, 3}), 0).shape(), (Shape{0, 3}));
  const Tensor index = Tensor::from<std::int64_t>({2, 2, 0, 1}, {2, 2});
  const Tensor source = Tensor::from(Values{10, 20, 30, 40}, {2, 2});
  EXPECT_THAT(scatter_add(x, index, source).to_vector(), ElementsAre(3, 1, 32, 36, 45, 4));
  EXPECT_THAT(x.to_vector(), ElementsAre(3, 1, 2, 6, 5, 4));
}

TEST(ComposedOps, NormsOfZerosHaveGradientZero) {
  const Tensor x = Tensor::from(Values{3, 4, 0, 0}, {2, 2}).set_requires_grad(true);
  const Tensor y = norm(x, {1});
  EXPECT_THAT(y.to_vector(), ElementsAre(5, 0));
  backward(sum(y));
  expect_close(x.grad(), {0.6, 0.8, 0, 0}, 1e-12);
  EXPECT_NEAR(norm(Tensor::full({4}, 300.0, DType::f16)).item(), 600, 1);  // squares overflow f16
}

TEST(ComposedOps, RandnIsTheGeneratorsNormal) {
  manual_seed(5);
  const Tensor x = randn({4, 1000});
  EXPECT_EQ(x.dtype(), DType::f32);
  EXPECT_NEAR(mean(x).item(), 0, 0.05);
  EXPECT_NEAR(var(x).item(), 1, 0.1);
  const Tensor other = randn({4, 1000});
  manual_seed(5);
  EXPECT_EQ(randn({4, 1000}).to_vector(), x.to_vector());
  EXPECT_NE(other.to_vector(), x.to_vector());
  const Tensor half = randn({10}, DType::bf16);
  EXPECT_EQ(half.dtype(), DType::bf16);
  EXPECT_EQ(half.device(), core::default_device());
}

/// By its formula, element by element.
Values einsum_by_loops(const std::string& a, const Tensor& x, const std::string& b, const Tensor& y,
                       const std::string& out) {
  std::map<char, std::int64_t> sizes;
  for (std::size_t i = 0; i < a.size(); ++i) sizes[a[i]] = x.size(static_cast<int>(i));
  for (std::size_t i = 0; i < b.size(); ++i) sizes[b[i]] = y.size(static_cast<int>(i));
  std::string all;
  for (const auto& [letter, size] : sizes) all += letter;
  const auto place = [&](const std::string& letters, std::map<char, std::int64_t>& at) {
    std::size_t place = 0;
    for (const char letter : letters)
      place =
          place * static_cast<std::size_t>(sizes[letter]) + static_cast<std::size_t>(at[letter]);
    return place;
  };
  std::size_t count = 1;
  for (const char letter : out) count *= static_cast<std::size_t>(sizes[letter]);
  Values result(count, 0.0);
  const Values xs = x.to_vector(), ys = y.to_vector();
  std::map<char, std::int64_t> at;
  const std::function<void(std::size_t)> walk = [&](std::size_t depth) {
    if (depth == all.size()) {
      result[place(out, at)] += xs[place(a, at)] * ys[place(b, at)];
      return;
    }
    for (at[all[depth]] = 0; at[all[depth]] < sizes[all[depth]]; ++at[all[depth]]) walk(depth + 1);
  };
  walk(0);
  return result;
}

TEST(Einsum, IsItsFormula) {
  struct Case {
    std::string a, b, out;
    Shape x, y;
  };
  for (const Case& c :
       {Case{"ij", "jk", "ik", {2, 3}, {3, 4}},
        Case{"bhtd", "bhsd", "bhts", {2, 3, 4, 5}, {2, 3, 6, 5}},
        Case{"bij", "kjb", "kib", {2, 3, 4}, {5, 4, 2}}, Case{"i", "j", "ji", {3}, {4}},
        Case{"ij", "ij", "", {3, 4}, {3, 4}}, Case{"ijk", "kl", "l", {2, 3, 4}, {4, 5}},
        Case{"ij", "ij", "ij", {3, 4}, {3, 4}}}) {
    const Tensor x = random_tensor(c.x, 5), y = random_tensor(c.y, 6);
    expect_close(einsum(c.a + "," + c.b + "->" + c.out, {x, y}),
                 einsum_by_loops(c.a, x, c.b, y, c.out), 1e-12);
  }
  const Tensor x = random_tensor({2, 3, 4}, 7);
  EXPECT_EQ(einsum("abc->cab", {x}).to_vector(), permute(x, {2, 0, 1}).to_vector());
  expect_close(einsum("abc->b", {x}), sum(x, {0, 2}).to_vector(), 1e-12);
}

TEST(ComposedOps, SayWhatWasExpected) {
  const Tensor x = random_tensor({2, 3}, 8);
  const auto refused = [&](const char* formula, const std::vector<Tensor>& xs, const char* why) {
    EXPECT_THAT(error_of([&] { (void)einsum(formula, xs); }), HasSubstr(why)) << formula;
  };
  refused("ij,jk", {x, x}, "names no result");
  refused("ii->i", {random_tensor({2, 2}, 1)}, "'i' comes twice");
  refused("iJ->i", {x}, "has 'J'");
  refused("ij->k", {x}, "no tensor has the result's 'k'");
  refused("ij,jk->ik", {x}, "of 2 tensors, not of the 1");
  refused("ijk->i", {x}, "'ijk' is no name for [2, 3]");
  refused("ij,ik->jk", {x, random_tensor({4, 5}, 1)}, "'i' is 2 and 4");
  EXPECT_THAT(error_of([&] { (void)squeeze(x, 0); }), HasSubstr("size 1 in dimension 0"));
  EXPECT_THAT(error_of([&] { (void)split(x, 0); }), HasSubstr("size > 0"));
  EXPECT_THAT(error_of([&] { (void)pad(x, 0, -1, 0); }), HasSubstr("0 or more"));
  EXPECT_THAT(error_of([&] { (void)var(x, {0}, false, 2); }), HasSubstr("more than 2"));
  EXPECT_THAT(error_of([&] { (void)arange(3, 2); }), HasSubstr("begin <= end"));
  const Tensor index = Tensor::from<std::int64_t>({0, 3}, {2, 1});
  EXPECT_THAT(error_of([&] { (void)scatter_add(x, index, x); }), HasSubstr("a source [..., K]"));
  const auto outside = [&] { (void)scatter_add(x, index, random_tensor({2, 1}, 1)); };
  if (core::default_device().is_cpu()) {  // a GPU would have to be waited for
    EXPECT_THAT(error_of(outside), HasSubstr("indices in 0..5"));
  }
  EXPECT_THAT(error_of([&] { (void)index_select(x, 0, index); }), HasSubstr("an index [K]"));
  EXPECT_THAT(error_of([&] { (void)tril(random_tensor({3}, 1)); }), HasSubstr("[..., M, N]"));
}

}  // namespace
}  // namespace cairn::autograd::testing
