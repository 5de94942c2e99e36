// Random sequences of collectives: the same bits on every mesh, on every rank and in every run, and
// those of a sum in rank order.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <cstring>

#include "cairn/core/tensor.h"
#include "collectives/cpu/mesh_collectives.h"
#include "meshes.h"
#include "transports/shm/shm_mesh.h"

namespace cairn::parallel {
namespace {

struct Step {
  int kind = 0;
  std::vector<std::int64_t> counts;  // one a rank
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
};
using Program = std::vector<Step>;
using MakeMesh = std::function<std::unique_ptr<Mesh>(int rank)>;

constexpr int kKinds = 8;

std::ostream& operator<<(std::ostream& out, const Step& step) {
  out << "kind " << step.kind << " " << step.dtype << " " << name(step.op) << " root " << step.root
      << " counts";
  for (const std::int64_t count : step.counts) out << " " << count;
  return out;
}

std::int64_t sum(const Counts& counts) {
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  return total;
}

/// Values whose order of summation shows in the last bits.
Tensor rough(int rank, std::int64_t n, DType dtype) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(std::sin(static_cast<double>(i) * 0.37 + rank * 1.7) * (1.0 + rank * 10));
  return Tensor::from(values, {n}, dtype);
}

std::string bits(const Tensor& x) {
  return {static_cast<const char*>(x.raw_data()), x.view().nbytes()};
}

/// What a rank has after a step.
std::string run(Collectives& c, const Step& s, int rank) {
  const std::int64_t total = sum(s.counts), own = s.counts[static_cast<std::size_t>(rank)];
  const Tensor whole = rough(rank, total, s.dtype), part = rough(rank, own, s.dtype),
               out = Tensor::zeros({total}, s.dtype), mine = Tensor::zeros({own}, s.dtype);
  switch (s.kind) {
    case 0:
      c.all_reduce(whole, s.op);
      return bits(whole);
    case 1:
      c.reduce(whole, out, s.op, s.root);
      return rank == s.root ? bits(out) : "";
    case 2:
      c.reduce_scatter(whole, mine, s.counts, s.op);
      return bits(mine);
    case 3:
      c.all_gather(part, out, s.counts);
      return bits(out);
    case 4:
      c.gather(part, out, s.counts, s.root);
      return rank == s.root ? bits(out) : "";
    case 5:
      c.scatter(whole, mine, s.counts, s.root);
      return bits(mine);
    case 6:
      c.broadcast(whole, s.root);
      return bits(whole);
    default:
      c.barrier();
      return "";
  }
}

std::vector<std::vector<std::string>> run(const Program& program, int world, const MakeMesh& mesh) {
  std::vector<std::vector<std::string>> results(static_cast<std::size_t>(world));
  test::in_threads(world, [&](int rank) {
    const auto collectives = make_mesh_collectives(mesh(rank));
    std::uint64_t number = 0;
    for (const Step& step : program) {
      collectives->begin({.fingerprint = ++number * 0xbf58476d1ce4e5b9u});
      results[static_cast<std::size_t>(rank)].push_back(run(*collectives, step, rank));
    }
  });
  return results;
}

rc::Gen<Step> any_step(int world) {
  const auto count = rc::gen::weightedOneOf<std::int64_t>(
      {{3, rc::gen::inRange<std::int64_t>(0, 40)}, {1, rc::gen::inRange<std::int64_t>(0, 60'000)}});
  return rc::gen::apply(
      [](int kind, std::vector<std::int64_t> counts, DType dtype, ReduceOp op, int root) {
        return Step{kind, std::move(counts), dtype, op, root};
      },
      rc::gen::inRange(0, kKinds),
      rc::gen::container<std::vector<std::int64_t>>(static_cast<std::size_t>(world), count),
      rc::gen::element(DType::f16, DType::bf16, DType::f32, DType::f64),
      rc::gen::element(ReduceOp::sum, ReduceOp::mean, ReduceOp::max, ReduceOp::min,
                       ReduceOp::product),
      rc::gen::inRange(0, world));
}

/// The f32 sum in rank order.
std::string ordered_sum(int world, std::int64_t n) {
  std::vector<float> all = rough(0, n, DType::f32).to_vector<float>();
  for (int rank = 1; rank < world; ++rank) {
    const auto x = rough(rank, n, DType::f32).to_vector<float>();
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += x[i];
  }
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(float)};
}

TEST(Random, SequencesGiveTheSameBitsOnEveryMeshRankAndRun) {
  EXPECT_TRUE(rc::check([] {
    const int world = *rc::gen::resize(100, rc::gen::inRange(2, 12));
    const int steps = *rc::gen::resize(100, rc::gen::inRange(1, 6));
    const Program program = *rc::gen::container<Program>(static_cast<std::size_t>(steps),
                                                         rc::gen::resize(100, any_step(world)));
    test::Post post(world);
    const auto segment = ShmSegment::create(world);
    const auto posted = run(
        program, world, [&](int rank) { return std::make_unique<test::CountingMesh>(post, rank); });
    const auto shared =
        run(program, world, [&](int rank) { return std::make_unique<ShmMesh>(segment, rank); });
    RC_ASSERT(posted == shared);
    test::Post other(world);
    const auto eager = run(
        program, world, [&](int rank) { return std::make_unique<test::EagerMesh>(other, rank); });
    RC_ASSERT(posted == eager);
    for (std::size_t i = 0; i < program.size(); ++i) {
      const Step& step = program[i];
      if (step.kind != 0) continue;
      for (const auto& results : shared) RC_ASSERT(results[i] == shared[0][i]);
      if (step.dtype == DType::f32 && step.op == ReduceOp::sum)
        RC_ASSERT(shared[0][i] == ordered_sum(world, sum(step.counts)));
    }
  }));
}

}  // namespace
}  // namespace cairn::parallel
