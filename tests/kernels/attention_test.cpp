#include "cairn/kernels/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/dropout.h"
#include "layouts.h"
#include "support/message_of.h"
#include "support/near.h"

namespace cairn::kernels {
namespace {

using test::expect_near_largest;
using test::message_of;
using testing::HasSubstr;

struct AttentionCase {
  std::int64_t B, H, T, S, D;
  AttentionOptions options;
  std::vector<std::int64_t> lengths = {};  // of keys; empty: all S
  std::int64_t G = H;                      // heads of keys and of values

  std::int64_t keys_of(std::int64_t sample) const {
    return lengths.empty() ? S : lengths[static_cast<std::size_t>(sample)];
  }
  Shape queries() const { return {B, H, T, D}; }
  Shape keys() const { return {B, G, S, D}; }
  std::string text() const {
    return "B " + std::to_string(B) + " H " + std::to_string(H) + " G " + std::to_string(G) +
           " T " + std::to_string(T) + " S " + std::to_string(S) + " D " + std::to_string(D) +
           (options.causal ? " causal" : "") + " dropout " + std::to_string(options.dropout) +
           " lengths " + testing::PrintToString(lengths);
  }
};

/// Where an element lies: heads packed [B, H, N, D], or interleaved as in a projection [B, N, H,
/// D], or with the last dimension apart [B, H, D, N].
enum class HeadLayout { packed, interleaved, columns };
constexpr HeadLayout kLayouts[] = {HeadLayout::packed, HeadLayout::interleaved,
                                   HeadLayout::columns};

Tensor laid_out(const Shape& shape, HeadLayout layout, DType dtype, Device device,
                const std::vector<double>& values) {
  const std::int64_t B = shape[0], H = shape[1], N = shape[2], D = shape[3];
  const auto place = [&](const Tensor& stored) {
    switch (layout) {
      case HeadLayout::packed:
        return stored.view();
      case HeadLayout::interleaved:
        return stored.view().permute({0, 2, 1, 3});
      case HeadLayout::columns:
        return stored.view().permute({0, 1, 3, 2});
    }
    return TensorView();
  };
  const Shape stored = layout == HeadLayout::packed        ? shape
                       : layout == HeadLayout::interleaved ? Shape{B, N, H, D}
                                                           : Shape{B, H, D, N};
  const Tensor host = Tensor::empty(stored, DType::f64, Device());
  const TensorView to = place(host);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const std::int64_t at = i / (H * N * D) * to.strides[0] + i / (N * D) % H * to.strides[1] +
                            i / D % N * to.strides[2] + i % D * to.strides[3];
    host.data<double>()[at] = values[static_cast<std::size_t>(i)];
  }
  const Tensor there = Tensor::from(host.to_vector<double>(), stored, dtype, device);
  return there.alias(place(there));
}

/// While it lives a GPU's own kernels compute, and not cuDNN's.
class OwnKernels {
 public:
  OwnKernels() : before_(getenv(kName) == nullptr ? "" : getenv(kName)) { setenv(kName, "own", 1); }
  ~OwnKernels() { before_.empty() ? unsetenv(kName) : setenv(kName, before_.c_str(), 1); }
  OwnKernels(const OwnKernels&) = delete;
  OwnKernels& operator=(const OwnKernels&) = delete;

 private:
  static constexpr const char* kName = "CAIRN_ATTENTION";
  std::string before_;
};

/// What a naive reading of the formula gives, in double.
struct Reference {
  std::vector<double> y, lse, dq, dk, dv;
  double difference = 0;  // the largest p (|dp| + |sum of p dp|), whose rounding dq and dk carry
};

std::vector<double> mask_of(const AttentionCase& c, Device device) {
  const Shape shape{c.B, c.H, c.T, c.S};
  const Tensor ones = Tensor::full(shape, 1.0, DType::f64, device);
  if (c.options.dropout > 0) {
    dropout(ones, c.options.dropout, c.options.draw, ones);
  }
  return ones.to_vector<double>();
}

Reference reference(const AttentionCase& c, const std::vector<double>& q,
                    const std::vector<double>& k, const std::vector<double>& v,
                    const std::vector<double>& dy, const std::vector<double>& mask) {
  Reference r{std::vector<double>(q.size()), {},
              std::vector<double>(q.size()), std::vector<double>(k.size()),
              std::vector<double>(k.size()), 0};
  const auto D = static_cast<std::size_t>(c.D), S = static_cast<std::size_t>(c.S);
  std::vector<double> p(S), g(S);
  for (std::size_t row = 0; row < q.size() / D; ++row) {
    const std::size_t head = row / static_cast<std::size_t>(c.T);
    const std::size_t keys = head / static_cast<std::size_t>(c.H / c.G) * S;
    const auto t = static_cast<std::int64_t>(row) % c.T;
    const std::int64_t seen = c.options.causal ? std::max<std::int64_t>(0, t + c.S - c.T + 1) : c.S;
    const std::int64_t length = c.keys_of(static_cast<std::int64_t>(head) / c.H);
    const auto n = static_cast<std::size_t>(std::min(seen, length));
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::size_t s = 0; s < n; ++s) {
      p[s] = 0;
      for (std::size_t d = 0; d < D; ++d) p[s] += q[row * D + d] * k[(keys + s) * D + d];
      p[s] *= c.options.scale;
      top = std::max(top, p[s]);
    }
    for (std::size_t s = 0; s < n; ++s) sum += std::exp(p[s] - top);
    r.lse.push_back(top + std::log(sum));
    double along = 0;  // sum over s of p dp
    for (std::size_t s = 0; s < n; ++s) {
      p[s] = std::exp(p[s] - r.lse.back());
      const double m = mask[row * S + s];
      g[s] = 0;
      for (std::size_t d = 0; d < D; ++d) {
        r.y[row * D + d] += m * p[s] * v[(keys + s) * D + d];
        r.dv[(keys + s) * D + d] += m * p[s] * dy[row * D + d];
        g[s] += m * dy[row * D + d] * v[(keys + s) * D + d];
      }
      along += p[s] * g[s];
    }
    for (std::size_t s = 0; s < n; ++s) {
      const double ds = p[s] * (g[s] - along) * c.options.scale;
      r.difference = std::max(r.difference, p[s] * (std::abs(g[s]) + std::abs(along)));
      for (std::size_t d = 0; d < D; ++d) {
        r.dq[row * D + d] += ds * k[(keys + s) * D + d];
        r.dk[(keys + s) * D + d] += ds * q[row * D + d];
      }
    }
  }
  return r;
}

class Attention : public testing::TestWithParam<Device> {
 protected:
  struct Result {
    Tensor q, k, v, dy, y, lse, dq, dk, dv;
  };

#ifdef CAIRN_SIMT_EMULATOR  // CUDA's kernels in the CPU's memory, without cuBLASLt's products
  static constexpr bool kEmulated = true;
#else
  static constexpr bool kEmulated = false;
#endif
  static bool takes(DType dtype, std::int64_t D) {
    return !kEmulated || (dtype != DType::f64 && D <= 256);
  }

  Result run(const AttentionCase& c, DType dtype, HeadLayout layout, std::uint64_t seed) const {
    const auto input = [&](const Shape& shape, std::uint64_t s) {
      return laid_out(shape, layout, dtype, GetParam(), random_values(shape.numel(), s, -1, 1));
    };
    const auto output = [&](const Shape& shape) {
      const std::vector<double> rubbish(static_cast<std::size_t>(shape.numel()),
                                        std::numeric_limits<double>::quiet_NaN());
      return laid_out(shape, layout, dtype, GetParam(), rubbish);
    };
    Result r{
        input(c.queries(), seed),
        input(c.keys(), seed + 1),
        input(c.keys(), seed + 2),
        input(c.queries(), seed + 3),
        output(c.queries()),
        Tensor::empty({c.B, c.H, c.T}, dtype == DType::f64 ? DType::f64 : DType::f32, GetParam()),
        output(c.queries()),
        output(c.keys()),
        output(c.keys())};
    Tensor lengths;
    AttentionOptions options = c.options;
    if (!c.lengths.empty()) {
      lengths = Tensor::from(std::vector<double>(c.lengths.begin(), c.lengths.end()), {c.B},
                             DType::i64, GetParam());
      options.key_lengths = lengths;
    }
    attention(r.q, r.k, r.v, r.y, r.lse, options);
    attention_backward(r.q, r.k, r.v, r.y, r.lse, r.dy, r.dq, r.dk, r.dv, options);
    return r;
  }

  void expect_reference(const AttentionCase& c, DType dtype, HeadLayout layout,
                        std::uint64_t seed) const {
    SCOPED_TRACE(c.text() + " " + std::string(core::name(dtype)) + " layout " +
                 std::to_string(static_cast<int>(layout)) + " seed " + std::to_string(seed));
    const Result r = run(c, dtype, layout, seed);
    const Reference e =
        reference(c, r.q.to_vector<double>(), r.k.to_vector<double>(), r.v.to_vector<double>(),
                  r.dy.to_vector<double>(), mask_of(c, GetParam()));
    const double tolerance = 8 * epsilon(dtype) + (dtype == DType::f64 ? 1e-12 : 4e-6);
    expect_near_largest(r.y.to_vector<double>(), e.y, tolerance, 1e-6, "y");
    expect_near_largest(r.lse.to_vector<double>(), e.lse, dtype == DType::f64 ? 1e-12 : 1e-5, 1e-6,
                        "lse");
    const double difference = 1e-6 + e.difference * std::abs(c.options.scale);
    expect_near_largest(r.dq.to_vector<double>(), e.dq, 2 * tolerance, difference, "dq");
    expect_near_largest(r.dk.to_vector<double>(), e.dk, 2 * tolerance, difference, "dk");
    expect_near_largest(r.dv.to_vector<double>(), e.dv, 2 * tolerance, 1e-6, "dv");
  }
};

TEST_P(Attention, MatchesTheReferenceInEveryDtypeAndLayout) {
  const AttentionCase cases[] = {
      {2, 3, 5, 5, 8, {.scale = 0.35}},
      {1, 2, 67, 67, 16, {.causal = true, .scale = 0.25}},
      {1, 1, 4, 70, 33, {.causal = true, .scale = 0.2}},
      {1, 1, 70, 4, 32, {.causal = true, .scale = 0.2}},
      {1, 2, 33, 47, 64, {.scale = 0.125, .dropout = 0.3, .draw = {5, 9}}},
      {1, 1, 40, 40, 128, {.causal = true, .scale = 0.09, .dropout = 0.5, .draw = {2, 0}}},
      {4, 2, 20, 70, 16, {.scale = 0.25}, {70, 0, 33, 1}},
      {2, 2, 70, 70, 24, {.causal = true, .scale = 0.2, .dropout = 0.2, .draw = {3, 1}}, {64, 7}},
      {2, 6, 40, 70, 16, {.causal = true, .scale = 0.25}, {}, 2},
      {1, 4, 24, 24, 64, {.causal = true, .scale = 0.125}, {}, 2},
      {1, 4, 20, 24, 64, {.scale = 0.125}, {}, 2},
      {1, 1, 24, 40, 64, {.causal = true, .scale = 0.125}},
      {1, 4, 130, 70, 33, {.causal = true, .scale = 0.2}, {}, 1},
      {2, 4, 33, 40, 8, {.scale = 0.3, .dropout = 0.3, .draw = {7, 2}}, {40, 7}, 2},
      {1, 3, 9, 11, 260, {.causal = true, .scale = 0.06, .dropout = 0.2, .draw = {4, 3}}, {}, 1}};
  std::uint64_t seed = 1;
  for (const AttentionCase& c : cases) {
    for (const DType dtype : test::kFloating) {
      if (!takes(dtype, c.D)) continue;
      for (const HeadLayout layout : kLayouts) expect_reference(c, dtype, layout, seed += 4);
    }
  }
}

TEST_P(Attention, MatchesTheReferenceInDrawnShapes) {
  std::mt19937 draw(20261121);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(draw() % n); };
  const std::int64_t edges[] = {1, 15, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 257};
  const auto length = [&] { return below(2) == 0 ? edges[below(14)] : 1 + below(150); };
  for (int i = 0; i < 40; ++i) {
    AttentionCase c{1 + below(2), 1 + below(3), length(), length(), 1 + below(80), {}};
    if (below(3) == 0) c.H *= 2 + below(3);
    if (below(6) == 0) c.D = 1 + below(300);
    c.options.causal = below(2) == 0;
    c.options.scale = 1.0 / std::sqrt(static_cast<double>(c.D));
    if (below(3) == 0) c.options.dropout = 0.1 + 0.2 * static_cast<double>(below(4));
    c.options.draw = {draw(), draw()};
    for (std::int64_t b = below(2) == 0 ? c.B : 0; b > 0; --b) c.lengths.push_back(below(c.S + 1));
    const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
    const DType dtype = dtypes[below(3)];
    if (!takes(dtype, c.D)) continue;
    expect_reference(c, dtype, kLayouts[below(3)], draw());
    if (HasFatalFailure()) return;
  }
}

/// Sizes around those of the tiles in which a kernel works, and head sizes to which it pads.
TEST_P(Attention, MatchesTheReferenceAtTheEdgesOfTiles) {
  const std::int64_t lengths[][2] = {{1, 1},   {1, 65},   {65, 1},    {16, 16},  {31, 33},
                                     {64, 64}, {63, 129}, {128, 128}, {129, 64}, {200, 72}};
  const DType dtypes[] = {DType::bf16, DType::f32, DType::f16};
  std::uint64_t seed = 1000;
  int i = 0;
  for (const auto& [T, S] : lengths) {
    for (const std::int64_t D : {8, 32, 64, 72, 128, 256}) {
      AttentionCase c{1, 1, T,
                      S, D, {.causal = i % 5 < 3, .scale = 1 / std::sqrt(static_cast<double>(D))}};
      if (i % 4 == 0) c.options.dropout = 0.25, c.options.draw.seed = seed;
      expect_reference(c, dtypes[(i + i / 6) % 3], kLayouts[i % 2], seed += 4);
      ++i;
    }
  }
}

TEST_P(Attention, TakesScalesOfEitherSignAndNone) {
  for (const double scale : {-0.4, 0.0}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_reference({1, 2, 37, 53, 24, {.causal = true, .scale = scale}}, dtype,
                       HeadLayout::packed, 5);
    }
  }
}

TEST_P(Attention, ReadsKeysThatHeadsShare) {
  const OwnKernels own;
  const Tensor q =
      Tensor::from(random_values(4 * 9 * 16, 1, -1, 1), {1, 4, 9, 16}, DType::bf16, GetParam());
  const Tensor k =
      Tensor::from(random_values(9 * 16, 2, -1, 1), {1, 1, 9, 16}, DType::bf16, GetParam());
  const Tensor each = Tensor::empty({1, 4, 9, 16}, DType::bf16, GetParam());
  copy(k.view().expand({1, 4, 9, 16}), each);
  const auto y_of = [&](const TensorView& keys) {
    const Tensor y = Tensor::empty({1, 4, 9, 16}, DType::bf16, GetParam());
    attention(q, keys, keys, y, Tensor::empty({1, 4, 9}, DType::f32, GetParam()), {.scale = 0.25});
    return y.to_vector<double>();
  };
  EXPECT_EQ(y_of(k.view().expand({1, 4, 9, 16})), y_of(each));
}

/// A head of keys that several of queries share is what they would read of copies; dk and dv are
/// sums over them.
TEST_P(Attention, HeadsOfQueriesShareThoseOfKeys) {
  const AttentionCase grouped{2, 6, 37, 50, 16, {.causal = true, .scale = 0.25}, {}, 2};
  const Result r = run(grouped, DType::f32, HeadLayout::packed, 9);
  const Shape each{2, 2, 3, 50, 16};
  const auto copied = [&](const Tensor& x) {
    const Tensor y = Tensor::empty({2, 6, 50, 16}, DType::f32, GetParam());
    copy(x.view().unsqueeze(2).expand(each), y.view().reshape(each));
    return y;
  };
  const Tensor k = copied(r.k), v = copied(r.v), y = Tensor::empty_like(r.y),
               lse = Tensor::empty_like(r.lse), dq = Tensor::empty_like(r.q),
               dk = Tensor::empty_like(k), dv = Tensor::empty_like(k);
  attention(r.q, k, v, y, lse, grouped.options);
  attention_backward(r.q, k, v, y, lse, r.dy, dq, dk, dv, grouped.options);
  EXPECT_EQ(y.to_vector(), r.y.to_vector());
  EXPECT_EQ(lse.to_vector(), r.lse.to_vector());
  EXPECT_EQ(dq.to_vector(), r.dq.to_vector());
  const auto sums = [&](const Tensor& x) {
    const std::vector<double> all = x.to_vector<double>();
    std::vector<double> summed(all.size() / 3);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t head = i / (50 * 16);
      summed[head / 3 * 50 * 16 + i % (50 * 16)] += all[i];
    }
    return summed;
  };
  expect_near_largest(r.dk.to_vector<double>(), sums(dk), 4e-6, 1e-6, "dk");
  expect_near_largest(r.dv.to_vector<double>(), sums(dv), 4e-6, 1e-6, "dv");
}

TEST_P(Attention, LargeScoresNeitherOverflowNorVanish) {
  const AttentionCase c{1, 1, 40, 40, 16, {.causal = true, .scale = 200.0}};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Result r = run(c, dtype, HeadLayout::packed, 3);
    for (const Tensor& t : {r.y, r.lse, r.dq, r.dk, r.dv}) {
      for (const double x : t.to_vector<double>()) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST_P(Attention, GivesTheSameBitsInEveryRun) {
  const AttentionCase c{2,   2,  130,
                        130, 32, {.causal = true, .scale = 0.2, .dropout = 0.2, .draw = {1, 0}}};
  const Result once = run(c, DType::bf16, HeadLayout::interleaved, 1);
  for (int i = 0; i < 3; ++i) {
    const Result again = run(c, DType::bf16, HeadLayout::interleaved, 1);
    EXPECT_EQ(once.y.to_vector(), again.y.to_vector());
    EXPECT_EQ(once.dq.to_vector(), again.dq.to_vector());
    EXPECT_EQ(once.dk.to_vector(), again.dk.to_vector());
    EXPECT_EQ(once.dv.to_vector(), again.dv.to_vector());
  }
}

TEST_P(Attention, SharesAHeadAmongThreads) {
  if (!GetParam().is_cpu() || kEmulated) GTEST_SKIP() << "threads are the CPU's";
  const AttentionOptions options{.causal = true, .scale = 0.2, .dropout = 0.2, .draw = {1, 0}};
  const AttentionCase one{1, 1, 700, 600, 40, options}, grouped{1, 3, 300, 600, 40, options, {}, 1};
  const int threads = core::num_threads();
  for (const auto& [c, dtype] : {std::pair(one, DType::f32), std::pair(one, DType::bf16),
                                 std::pair(grouped, DType::f32), std::pair(grouped, DType::bf16)}) {
    core::set_num_threads(1);
    const Result alone = run(c, dtype, HeadLayout::interleaved, 1);
    for (const int n : {3, 8}) {
      core::set_num_threads(n);
      expect_reference(c, dtype, HeadLayout::interleaved, 1);
      const Result shared = run(c, dtype, HeadLayout::interleaved, 1);
      EXPECT_EQ(alone.y.to_vector(), shared.y.to_vector());
      EXPECT_EQ(alone.dk.to_vector(), shared.dk.to_vector());
      const Result again = run(c, dtype, HeadLayout::interleaved, 1);
      EXPECT_EQ(again.dq.to_vector(), shared.dq.to_vector());
    }
  }
  core::set_num_threads(threads);
}

TEST_P(Attention, WorkspaceGrowsWithTheQueriesAlone) {
  if (kEmulated) GTEST_SKIP() << "its workspace is not accounted";
  const OwnKernels own;  // cuDNN's backward keeps the scores
  const auto peak = [&](DType dtype, std::int64_t T, std::int64_t S) {
    core::reset_peak_memory(GetParam());
    run({1, 2, T, S, 16, {.causal = true, .scale = 0.2, .dropout = 0.1}}, dtype, HeadLayout::packed,
        1);
    return core::memory_stats(GetParam()).peak_of(core::MemoryCategory::workspace);
  };
  const int threads = core::num_threads();
  core::set_num_threads(2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::size_t small = peak(dtype, 256, 256);
    EXPECT_GT(small, 0u);
    // A query adds its dq (16 elements take the room of 40) and two numbers for each thread.
    EXPECT_LE(peak(dtype, 1024, 1024), small + std::size_t{2 * 768 * (40 + 2) * sizeof(float)});
    EXPECT_EQ(peak(dtype, 256, 1024), small);
  }
  core::set_num_threads(threads);
}

TEST_P(Attention, TakesEmptyBatchesAndNoKeys) {
  const AttentionCase nobody{0, 2, 3, 3, 4, {}};
  EXPECT_EQ(run(nobody, DType::f32, HeadLayout::packed, 1).y.numel(), 0);
  const AttentionCase blind{1, 2, 3, 0, 4, {}};
  const Result r = run(blind, DType::f32, HeadLayout::packed, 1);
  EXPECT_EQ(r.y.to_vector<double>(), std::vector<double>(24, 0.0));
  EXPECT_EQ(r.lse.to_vector<double>(),
            std::vector<double>(6, -std::numeric_limits<double>::infinity()));
  EXPECT_EQ(r.dq.to_vector<double>(), std::vector<double>(24, 0.0));
}

TEST_P(Attention, ErrorsNameWhatIsWrong) {
  const auto zeros = [](const Shape& shape, DType dtype = DType::f32) {
    return Tensor::zeros(shape, dtype, GetParam());
  };
  const Tensor q = zeros({1, 2, 3, 4}), k = zeros({1, 2, 5, 4}), lse = zeros({1, 2, 3});
  const auto message = [&](const Tensor& keys, const Tensor& values, const Tensor& sums,
                           const AttentionOptions& o = {}) {
    return message_of([&] { attention(q, keys, values, zeros({1, 2, 3, 4}), sums, o); });
  };
  EXPECT_THAT(message(zeros({1, 2, 5, 3}), zeros({1, 2, 5, 3}), lse),
              HasSubstr("expected q [B, H, T, D] and k, v [B, G, S, D], got [1, 2, 3, 4] and"));
  for (const std::int64_t heads : {0, 3, 4}) {
    const Tensor keys = zeros({1, heads, 5, 4});
    EXPECT_THAT(message(keys, keys, lse),
                HasSubstr("expected heads of q that are a multiple of those of k and v, got q [1, "
                          "2, 3, 4] and k [1, " +
                          std::to_string(heads) + ", 5, 4]"));
  }
  EXPECT_THAT(message(k, zeros({1, 2, 4, 4}), lse), HasSubstr("expected v of shape [1, 2, 5, 4]"));
  EXPECT_THAT(message(k, k, zeros({1, 2, 4})), HasSubstr("expected lse of shape [1, 2, 3]"));
  EXPECT_THAT(message(k, k, zeros({1, 2, 3}, DType::f64)), HasSubstr("expected lse of dtype f32"));
  EXPECT_THAT(message(k, k, lse, {.key_lengths = Tensor::zeros({2}, DType::i64, GetParam())}),
              HasSubstr("expected key_lengths of shape [1], got [2]"));
  EXPECT_THAT(message(k, k, lse, {.dropout = 1.0}), HasSubstr("expected a dropout in 0..1, got 1"));
  EXPECT_THAT(message(zeros({1, 2, 5, 4}, DType::bf16), zeros({1, 2, 5, 4}, DType::bf16), lse),
              HasSubstr("expected k of dtype f32 like q, got bf16"));
}

INSTANTIATE_TEST_SUITE_P(Devices, Attention, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
