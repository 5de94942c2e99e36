#include "cairn/core/generator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/tensor.h"

namespace cairn::core {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Rows "philox4x32 10" of tests/kat_vectors in DEShawResearch/random123.
TEST(Generator, MatchesTheRandom123Vectors) {
  EXPECT_EQ(philox(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint64_t kOnes = ~std::uint64_t{0};
  EXPECT_EQ(philox(kOnes, kOnes, kOnes), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Generator, ElementsDrawTheirOwnCounters) {
  Generator generator(42);
  generator.next();
  const Tensor x = Tensor::empty({1000});
  generator.fill_uniform(x, -2, 3);
  EXPECT_EQ(generator.offset(), 2u);
  for (const std::uint64_t i : {0u, 1u, 999u}) {
    const Words words = philox(42, 1, i);
    const std::uint64_t bits = (std::uint64_t{words[0]} << 32 | words[1]) >> 12;
    const double uniform = (static_cast<double>(bits) + 0.5) / 4503599627370496.0;
    EXPECT_EQ(x.data<float>()[i], static_cast<float>(-2 + 5 * uniform));
  }
}

// The same draws through libm, in long double.
TEST(Generator, NormalIsBoxMuller) {
  Generator generator(7);
  const Tensor x = Tensor::empty({20000});
  generator.fill_normal(x, 0, 1);
  const auto uniform = [](std::uint32_t high, std::uint32_t low) {
    return (static_cast<long double>((std::uint64_t{high} << 32 | low) >> 12) + 0.5L) / 0x1p52L;
  };
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const Words w = philox(7, 0, i);
    const long double radius = std::sqrt(-2 * std::log(uniform(w[0], w[1])));
    const long double expected = radius * std::cos(2 * M_PIl * uniform(w[2], w[3]));
    ASSERT_NEAR(x.data<float>()[i], static_cast<double>(expected),
                1e-7 * static_cast<double>(std::fabs(expected)) + 1e-12)
        << i;
  }
}

TEST(Generator, NormalHasItsMoments) {
  Generator generator(1);
  const Tensor x = Tensor::empty({200000});
  generator.fill_normal(x, 2, 3);
  double mean = 0, square = 0, cube = 0;
  for (const double v : x.to_vector()) {
    const double z = (v - 2) / 3;
    mean += z / 200000, square += z * z / 200000, cube += z * z * z / 200000;
  }
  EXPECT_NEAR(mean, 0, 0.01);
  EXPECT_NEAR(square, 1, 0.015);
  EXPECT_NEAR(cube, 0, 0.03);
}

TEST(Generator, SameBitsOnAnyNumberOfThreads) {
  const int threads = num_threads();
  const auto draw = [](int n) {
    set_num_threads(n);
    Generator generator(3);
    const Tensor x = Tensor::empty({70001});
    generator.fill_normal(x, 0, 1);
    return x.to_vector<float>();
  };
  EXPECT_EQ(draw(1), draw(4));
  set_num_threads(threads);
}

TEST(Generator, FillsInElementOrderWhateverTheStrides) {
  Generator a(5), b(5);
  const Tensor x = Tensor::empty({2, 3, 4, 5});
  const Tensor y =
      Tensor::empty_strided({2, 3, 4, 5}, channels_last_strides({2, 3, 4, 5}), DType::f32, {});
  a.fill_uniform(x, 0, 1);
  b.fill_uniform(y, 0, 1);
  EXPECT_EQ(x.to_vector(), y.to_vector());
  EXPECT_THROW(a.fill_uniform(Tensor::empty({2}, DType::f16), 0, 1), InvalidArgument);
}

TEST(Generator, StateRoundTrip) {
  Generator a(0xfedcba9876543210);
  a.next();
  Generator b;
  b.load_state_dict(a.state_dict());
  EXPECT_EQ(b.seed(), 0xfedcba9876543210);
  EXPECT_EQ(b.offset(), 1u);
  StateDict broken;
  broken.set("seed", std::int64_t{9});
  EXPECT_THROW(b.load_state_dict(broken), DataError);
  EXPECT_EQ(b.seed(), 0xfedcba9876543210);
}

TEST(Generator, EachThreadHasItsOwn) {
  manual_seed(11);
  std::uint64_t other = 1;
  std::thread([&] { other = Generator::current().seed(); }).join();
  EXPECT_EQ(other, 0u);
  EXPECT_EQ(Generator::current().seed(), 11u);
}

}  // namespace
}  // namespace cairn::core
