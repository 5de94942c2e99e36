#include <gtest/gtest.h>

#include <cmath>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"
#include "update_cases.h"

namespace cairn::kernels {
namespace {

using test::all_mixes;
using test::entries_of;
using test::make_parameter;
using test::Master;
using test::Mix;
using test::Parameter;
using test::Placed;
using test::random_values;
using test::Values;

double norm(const Values& values) {
  double sum = 0;
  for (double v : values) sum += v * v;
  return std::sqrt(sum);
}

/// The moments after a step, then the weight from the moments as they were stored (`stored`).
void expect_lamb(Parameter& p, const Parameter& stored, const LambOptions& o) {
  const Values g = p.g(o.gradient_scale);
  for (std::size_t i = 0; i < p.w.size(); ++i) {
    const double grad = g[i] + (o.adamw ? 0.0 : o.weight_decay * p.w[i]);
    p.m[i] = o.beta1 * p.m[i] + (o.grad_averaging ? 1 - o.beta1 : 1) * grad;
    p.v[i] = o.beta2 * p.v[i] + (1 - o.beta2) * grad * grad;
  }
  const Values m = stored.moment1.values(), v = stored.moment2.values();
  Values u(p.w.size());
  for (std::size_t i = 0; i < u.size(); ++i) {
    u[i] = m[i] / o.correction1 / (std::sqrt(v[i] / o.correction2) + o.eps);
    if (o.adamw) u[i] += o.weight_decay * p.w[i];
  }
  double ratio = 1.0;
  if ((o.use_nvlamb || o.weight_decay != 0) && norm(p.w) > 0 && norm(u) > 0) {
    ratio = norm(p.w) / norm(u);
  }
  for (std::size_t i = 0; i < u.size(); ++i) p.w[i] -= o.lr * ratio * u[i];
}

class Lamb : public testing::TestWithParam<Device> {
 protected:
  void check(std::int64_t n, const LambOptions& options) const {
    std::vector<Parameter> all;
    std::int64_t turn = 0;
    for (const Mix& mix : all_mixes()) {
      for (std::int64_t shift : {std::int64_t{0}, 1 + turn % 7}) {
        all.push_back(make_parameter(mix, n, GetParam(), 2, shift));
        all.back().gradient_factor = turn % 3 == 0 ? 0.5 : 1.0;
        all.back().l2 = turn % 5 == 0 ? 0.1 : 0.0;
        ++turn;
      }
    }
    update(entries_of(all), options);
    for (Parameter& p : all) {
      expect_lamb(p, p, options);
      p.expect_matches();
    }
  }
};

TEST_P(Lamb, MatchesTheReferenceForEveryMixOfDtypes) {
  const LambOptions options{.lr = 0.01,
                            .beta1 = 0.8,
                            .beta2 = 0.9,
                            .eps = 1e-3,
                            .weight_decay = 0.1,
                            .correction1 = 0.36,
                            .correction2 = 0.19,
                            .gradient_scale = 0.5};
  for (std::int64_t n : {0, 1, 5, 77, 1031, 65536 + 19}) check(n, options);
}

TEST_P(Lamb, MatchesTheReferenceForEveryOption) {
  for (bool adamw : {false, true}) {
    for (bool averaging : {false, true}) {
      for (bool nvlamb : {false, true}) {
        for (double decay : {0.0, 0.01}) {
          check(333, {.lr = 0.01,
                      .eps = 1e-3,
                      .weight_decay = decay,
                      .adamw = adamw,
                      .grad_averaging = averaging,
                      .use_nvlamb = nvlamb});
        }
      }
    }
  }
}

TEST_P(Lamb, WhereANormIsZeroTheRatioIsOne) {
  const Mix mix{DType::f32, DType::f32, DType::f32, Master::none};
  const Values zeros(50, 0.0);
  Parameter no_weight = make_parameter(mix, 50, GetParam(), 2, 1);
  no_weight.weight = Placed(zeros, DType::f32, GetParam(), 1), no_weight.w = zeros;
  Parameter no_update = make_parameter(mix, 50, GetParam(), 2, 1);
  for (Placed* t : {&no_update.gradient, &no_update.moment1, &no_update.moment2}) {
    *t = Placed(zeros, DType::f32, GetParam(), 1);
  }
  no_update.m = no_update.v = zeros;
  const LambOptions options{.weight_decay = 0.0, .use_nvlamb = true};
  const Values before = no_update.w;
  update(entries_of({no_weight, no_update}), options);
  expect_lamb(no_weight, no_weight, options);
  no_weight.expect_matches();
  EXPECT_EQ(no_update.truth(), before);
}

TEST_P(Lamb, ManyTensorsKeepTheirOwnRatios) {
  std::vector<Parameter> all;
  const auto mixes = all_mixes();
  for (std::int64_t k = 0; k < 400; ++k) {
    all.push_back(make_parameter(mixes[static_cast<std::size_t>(k) % mixes.size()], k % 41,
                                 GetParam(), 2, k % 8, static_cast<std::uint64_t>(k)));
  }
  const LambOptions options{.lr = 0.02, .eps = 1e-2};
  update(entries_of(all), options);
  update({}, options);
  for (Parameter& p : all) {
    expect_lamb(p, p, options);
    p.expect_matches();
  }
}

/// Two passes over parts of a tensor, cut between blocks as ranks cut it: update()'s bits.
TEST_P(Lamb, OfPartsHasTheBitsOfTheWhole) {
  const LambOptions options{.lr = 0.02, .weight_decay = 0.1, .gradient_scale = 0.5};
  for (const Mix& mix : all_mixes()) {
    for (const std::int64_t numel : {0, 700, 5000, 16384, 70001}) {
      const auto fresh = [&] { return make_parameter(mix, numel, GetParam(), 2, 0); };
      const Parameter whole = fresh(), parts = fresh();
      const UpdateEntry all = parts.entry();
      update({whole.entry()}, options);
      const auto piece_of = [&](core::ElementRange range) {
        UpdateEntry piece = all;
        for (TensorView* view :
             {&piece.gradient, &piece.weight, &piece.master, &piece.moment1, &piece.moment2}) {
          if (view->defined()) *view = view->slice(0, range.begin, range.end);
        }
        return piece;
      };
      std::vector<UpdateEntry> cut;
      std::vector<CheckedPiece> of_weight, of_update;
      for (int rank = 0; rank < 3; ++rank) {
        const core::ElementRange part = core::even_part(numel, rank, 3);
        cut.push_back(piece_of(part));
        std::vector<UpdateEntry> entries;
        const std::vector<core::ElementRange> pieces = pieces_of(part, numel);
        for (const core::ElementRange& piece : pieces) entries.push_back(piece_of(piece));
        const std::vector<TensorCheck> found = begin_lamb_update(entries, options).read();
        for (std::size_t k = 0; k < pieces.size(); ++k) {
          of_weight.push_back({pieces[k], found[2 * k]});
          of_update.push_back({pieces[k], found[2 * k + 1]});
        }
      }
      const LambNorms norms{join_pieces(of_weight).power_sum, join_pieces(of_update).power_sum};
      const Parameter measured = fresh();
      const std::vector<TensorCheck> sums = begin_lamb_update({measured.entry()}, options).read();
      EXPECT_EQ(norms.weight, sums[0].power_sum) << whole.name << ' ' << numel;
      EXPECT_EQ(norms.update, sums[1].power_sum) << whole.name << ' ' << numel;
      for (const UpdateEntry& part : cut) end_lamb_update({part}, {norms}, options);
      EXPECT_EQ(parts.truth(), whole.truth()) << whole.name << ' ' << numel;
      EXPECT_EQ(parts.moment2.values(), whole.moment2.values()) << whole.name << ' ' << numel;
    }
  }
  EXPECT_THROW(end_lamb_update({}, {{1.0, 1.0}}, options), core::InvalidArgument);
}

TEST(LambOnThreads, BitsDoNotDependOnTheirNumber) {
  const int before = core::num_threads();
  const Mix mix{DType::bf16, DType::bf16, DType::bf16, Master::remainder};
  std::vector<Values> weights;
  for (int threads : {1, 2, 7}) {
    core::set_num_threads(threads);
    const Parameter p = make_parameter(mix, 300001, {}, 2, 3);
    update({p.entry()}, LambOptions{});
    weights.push_back(p.truth());
  }
  core::set_num_threads(before);
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(weights[0], weights[2]);
}

INSTANTIATE_TEST_SUITE_P(Devices, Lamb, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
