// Every route of products and convolutions beside references in double precision, and the choice
// among them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/product_choices.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using checkpointing::TemporaryFolder;
using test::epsilon;
using testing::HasSubstr;

constexpr const char* kRoutes[] = {"default", "bf16", "bf16_packed", "f32", "f32_packed"};
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu,
                                       Activation::gelu_tanh};

class ProductRoutes : public testing::Test {
 protected:
  ~ProductRoutes() override {
    set_product_routes("default");
    core::set_num_threads(threads_);
  }
  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool coin() { return draw(0, 1) == 1; }
  template <class T, std::size_t N>
  T one_of(const T (&values)[N]) {
    return values[static_cast<std::size_t>(draw(0, N - 1))];
  }

  // A matrix as views are in training: stored by rows or columns, maybe a slice of a wider one.
  Tensor matrix(std::int64_t rows, std::int64_t columns, DType dtype) {
    const bool turned = coin();
    const Shape shape = turned ? Shape{columns, rows} : Shape{rows, columns};
    const std::int64_t offset = draw(0, 3), more = coin() ? draw(0, 5) : 0;
    const Tensor wide = test::random_tensor({shape[0], shape[1] + offset + more}, dtype, Device{},
                                            static_cast<std::uint64_t>(draw(0, 1 << 20)));
    const TensorView part = wide.view().slice(1, offset, offset + shape[1]);
    return wide.alias(turned ? part.transpose(0, 1) : part);
  }

  std::mt19937 random_{20261122};
  int threads_ = core::num_threads();
};

double product_routes_activate(Activation activation, double x) {
  switch (activation) {
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return x;
  }
}

// Searches shapes, layouts, dtypes, epilogues, thread counts.
TEST_F(ProductRoutes, EqualTheReferenceForRandomProducts) {
  constexpr DType kDtypes[] = {DType::f32, DType::bf16, DType::f16};
  for (int i = 0; i < 150; ++i) {
    const DType dtype = one_of(kDtypes), out = coin() ? dtype : DType::f32;
    const std::int64_t m = coin() ? draw(1, 20) : draw(1, 400), k = draw(1, 90), n = draw(1, 90);
    const Tensor a = matrix(m, k, dtype), b = matrix(k, n, dtype), y = matrix(m, n, out);
    MatmulOptions options{.alpha = coin() ? 1.0 : -0.5, .accumulate = coin()};
    Tensor bias;
    if (!options.accumulate) options.activation = one_of(kActivations);
    if (!options.accumulate && coin()) {
      bias = test::random_tensor({n}, coin() ? dtype : DType::f32, Device{}, 9);
      options.bias = bias;
    }
    const auto va = a.to_vector<double>(), vb = b.to_vector<double>();
    std::vector<double> expected = y.to_vector<double>();
    const auto biases = bias.defined() ? bias.to_vector<double>() : std::vector<double>();
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t column = 0; column < n; ++column) {
        double sum = 0.0;
        for (std::int64_t j = 0; j < k; ++j) {
          sum += va[static_cast<std::size_t>(row * k + j)] *
                 vb[static_cast<std::size_t>(j * n + column)];
        }
        double& e = expected[static_cast<std::size_t>(row * n + column)];
        e = options.alpha * sum + (options.accumulate ? e : 0.0) +
            (bias.defined() ? biases[static_cast<std::size_t>(column)] : 0.0);
        e = product_routes_activate(options.activation, e);
      }
    }
    core::set_num_threads(static_cast<int>(draw(1, 3)));
    const Tensor before = Tensor::empty({m, n}, out, Device{});
    copy(y, before);
    for (const char* route : kRoutes) {
      set_product_routes(route);
      copy(before, y);
      matmul(a, b, y, options);
      test::expect_close(
          y, expected, 1.5 * epsilon(out), 4e-7 * static_cast<double>(k + 4),
          core::str(i, ": ", route, ", ", core::name(dtype), " to ", core::name(out), ", ", m, "x",
                    k, "x", n, ", strides ", a.strides(), b.strides(), y.strides()));
    }
  }
}

// Of such sums oneDNN's tiles of bf16 leave 63 of 64 values to the last pass, and fail at many.
TEST_F(ProductRoutes, OfSumsOverAllButOneOfSomeTiles) {
  for (const std::int64_t k : {63, 63, 63, 127, 1407, 3647}) {
    for (const std::int64_t m : {34, 46, 199}) {
      const std::int64_t n = draw(4, 220);
      const Tensor a = matrix(m, k, DType::bf16), b = matrix(k, n, DType::bf16);
      const Tensor wide_a = Tensor::empty({m, k}, DType::f64, Device{}),
                   wide_b = Tensor::empty({k, n}, DType::f64, Device{}),
                   expected = Tensor::empty({m, n}, DType::f64, Device{}),
                   y = Tensor::empty({m, n}, DType::f32, Device{});
      copy(a, wide_a);
      copy(b, wide_b);
      matmul(wide_a, wide_b, expected);
      for (const char* route : kRoutes) {
        set_product_routes(route);
        matmul(a, b, y);
        test::expect_close(y, expected.to_vector<double>(), 1e-5, 4e-7 * static_cast<double>(k),
                           core::str(route, ", ", m, "x", k, "x", n));
      }
    }
  }
}

// b's columns are packed in panels.
TEST_F(ProductRoutes, EqualTheDefaultForManyColumns) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor a = matrix(70, 2100, dtype), b = matrix(2100, 4500, dtype);
    const Tensor bias = test::random_tensor({4500}, DType::f32, Device{}, 3);
    const Tensor y = Tensor::empty({70, 4500}, DType::f32, Device{}),
                 expected = Tensor::empty_like(y);
    set_product_routes("default");
    matmul(a, b, expected, {.bias = bias});
    for (const char* route : {"bf16_packed", "f32_packed"}) {
      set_product_routes(route);
      matmul(a, b, y, {.bias = bias});
      test::expect_close(y, expected.to_vector<double>(), 1e-5, 4e-7 * 2100, route);
    }
  }
}

// A route that a product cannot take gives it the default.
TEST_F(ProductRoutes, PinnedOnesAreTakenWherePossible) {
  const Tensor a = test::random_tensor({300, 500}, DType::f32, Device{}, 1);
  const Tensor b = test::random_tensor({500, 90}, DType::f32, Device{}, 2);
  const Tensor y = Tensor::empty({300, 90}, DType::f32, Device{});
  const auto bits = [&](const char* route) {
    set_product_routes(route);
    matmul(a, b, y);
    return y.to_vector<double>();
  };
  EXPECT_EQ(bits("bf16_packed"), bits("default"));
}

class TimedRoutes : public ProductRoutes {
 protected:
  TimedRoutes() {
    set_product_routes("time");
    products();
  }
  // Three works of which one is too small to be timed.
  static void products() {
    for (const std::int64_t m : {4, 130, 600}) {
      const Tensor a = test::random_tensor({m, 300}, DType::bf16, Device{}, 1);
      const Tensor b = test::random_tensor({300, 200}, DType::bf16, Device{}, 2);
      const Tensor y = Tensor::empty({m, 200}, DType::bf16, Device{});
      matmul(a, b, y);
    }
  }
  static nlohmann::json chosen() { return nlohmann::json::parse(product_choices()); }
};

TEST_F(TimedRoutes, AreNamedByShapeClass) {
  const auto choices = chosen();
  EXPECT_EQ(choices.at("setting"), "time");
  const std::string threads = core::str(", ", core::num_threads(), " threads");
  const auto& ways = choices.at("cpu_products");
  EXPECT_TRUE(ways.contains("matmul bf16 to bf16 nn 1x128x256x256" + threads)) << choices;
  EXPECT_TRUE(ways.contains("matmul bf16 to bf16 nn 1x512x256x256" + threads)) << choices;
  EXPECT_FALSE(ways.contains("matmul bf16 to bf16 nn 1x4x256x256" + threads)) << choices;
}

/// Times a product while so many threads want a core, and prints what is kept of it.
[[noreturn]] void time_beside(int threads) {
  const TemporaryFolder folder;
  setenv("CAIRN_CACHE", folder.string().c_str(), 1);
  std::atomic<bool> stop = false;
  std::vector<std::thread> others;
  for (int i = 0; i < threads; ++i)
    others.emplace_back([&] {
      while (!stop) {
      }
    });
  set_product_routes("time");
  const Tensor a = test::random_tensor({1024, 1024}, DType::f32, Device{}, 1);
  matmul(a, a, Tensor::empty_like(a));
  stop = true;
  for (std::thread& other : others) other.join();
  std::cerr << checkpointing::read_bytes(folder / "cpu_products.json") << "\n";
  std::exit(0);
}

// Of a process of its own: what it times first stands.
TEST(TimedRoutesDeathTest, OfABusyMachineStandForADay) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  EXPECT_EXIT(time_beside(3 * cores), testing::ExitedWithCode(0),
              "matmul f32 .*\"f32(_packed)? until [0-9]+\"");
}

// A product into which is added is timed on other memory.
TEST_F(TimedRoutes, AddOnce) {
  const Tensor a = test::random_tensor({512, 64}, DType::f32, Device{}, 1);
  const Tensor b = test::random_tensor({64, 256}, DType::f32, Device{}, 2);
  const Tensor y = Tensor::full({512, 256}, 1.0, DType::f32, Device{}), z = Tensor::empty_like(y);
  matmul(a, b, y, {.accumulate = true});
  set_product_routes("default");
  matmul(a, b, z);
  auto expected = z.to_vector<double>();
  for (double& x : expected) x += 1.0;
  test::expect_close(y, expected, 1e-5, 1e-5);
}

TEST_F(TimedRoutes, AreReadFromAFile) {
  const TemporaryFolder folder;
  auto pinned = chosen();
  for (auto& [work, way] : pinned["cpu_products"].items()) way = "f32_packed";
  checkpointing::write_bytes(folder / "choices.json", pinned.dump());
  set_product_routes(folder / "choices.json");
  products();
  EXPECT_EQ(chosen(), pinned);
}

TEST_F(TimedRoutes, OfAnotherProcessorAreWarnedOf) {
  auto foreign = chosen();
  for (auto& [work, way] : foreign["cpu_products"].items()) way = "f16_packed";
  const char* const variable = getenv("CAIRN_PRODUCTS");
  const std::string before = variable == nullptr ? "" : variable;
  unsetenv("CAIRN_PRODUCTS");
  use_product_choices(foreign.dump());
  if (!before.empty()) setenv("CAIRN_PRODUCTS", before.c_str(), 1);
  testing::internal::CaptureStderr();
  products();
  products();
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_THAT(warnings, HasSubstr("matmul bf16 to bf16 nn 1x512x256x256"));
  EXPECT_THAT(warnings, HasSubstr("'f16_packed'"));
  const std::size_t first = warnings.find("1x512x256x256");
  EXPECT_EQ(warnings.find("1x512x256x256", first + 1), std::string::npos) << warnings;
}

TEST_F(ProductRoutes, WrongSettingsAreNamed) {
  const TemporaryFolder folder;
  checkpointing::write_bytes(folder / "notes.json", "notes");
  EXPECT_THROW(set_product_routes("fastest"), core::InvalidArgument);
  EXPECT_THROW(set_product_routes(folder / "none.json"), core::IoError);
  EXPECT_THROW(set_product_routes(folder / "notes.json"), core::DataError);
  EXPECT_THROW(use_product_choices("{}"), core::DataError);
  EXPECT_THROW(use_product_choices(R"({"setting": "time", "cpu_products": 3})"), core::DataError);
  EXPECT_THROW(use_product_choices(R"({"setting": "quick"})"), core::DataError);
}

TEST_F(ProductRoutes, PrimitivesAreCounted) {
  const auto before = first_uses();
  const Tensor a = Tensor::full({7, 411}, 1.0, DType::f32, Device{});
  const Tensor b = Tensor::full({411, 13}, 1.0, DType::f32, Device{}),
               y = Tensor::empty({7, 13}, DType::f32, Device{});
  matmul(a, b, y);
  const auto after = first_uses();
  EXPECT_EQ(after.primitives, before.primitives + 1);
  EXPECT_GT(after.primitive_seconds, before.primitive_seconds);
  matmul(a, b, y);
  EXPECT_EQ(first_uses().primitives, after.primitives);
}

}  // namespace
}  // namespace cairn::kernels
