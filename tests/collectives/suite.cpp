#include "suite.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace cairn::test {
namespace {

using parallel::ProcessGroup;
using parallel::ReduceOp;
using Counts = std::vector<std::int64_t>;
using Values = std::vector<double>;

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i16,
                             DType::i32, DType::i64,  DType::u8,  DType::boolean};

double value_at(int rank, std::int64_t i, DType dtype, int salt) {
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(i) * 31 + static_cast<std::uint64_t>(rank) * 7 +
       static_cast<std::uint64_t>(salt) * 13 + 1) *
      0x9e3779b97f4a7c15u;
  const auto drawn = static_cast<int>(mixed >> 60);
  if (dtype == DType::boolean) return drawn % 2;
  if (dtype == DType::u8) return drawn % 3;
  return drawn % 5 - 2;
}

double apply(ReduceOp op, double a, double b) {
  if (op == ReduceOp::max) return std::max(a, b);
  if (op == ReduceOp::min) return std::min(a, b);
  return op == ReduceOp::product ? a * b : a + b;
}

std::vector<ReduceOp> operations_on(DType dtype) {
  if (dtype == DType::boolean) return {ReduceOp::max, ReduceOp::min};
  if (core::is_floating(dtype))
    return {ReduceOp::sum, ReduceOp::mean, ReduceOp::max, ReduceOp::min, ReduceOp::product};
  return {ReduceOp::sum, ReduceOp::max, ReduceOp::min, ReduceOp::product};
}

Values all_patterns(const Counts& counts, DType dtype) {
  Values all;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const Values part = pattern(static_cast<int>(r), counts[r], dtype).to_vector();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// Part `index` of values, by counts.
Values part_of(const Values& values, const Counts& counts, int index) {
  const auto begin = std::accumulate(counts.begin(), counts.begin() + index, std::int64_t{0});
  const auto first = values.begin() + begin;
  return {first, first + counts[static_cast<std::size_t>(index)]};
}

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Rank 1 has nothing where there are several.
Counts uneven_counts(int world, std::int64_t n) {
  Counts counts;
  for (int r = 0; r < world; ++r) counts.push_back(r == 1 ? 0 : n / (r + 1) + r);
  return counts;
}

}  // namespace

Tensor pattern(int rank, std::int64_t n, DType dtype, int salt) {
  Values values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(value_at(rank, i, dtype, salt));
  return Tensor::from(values, {n}, dtype);
}

Values reduced(int world, std::int64_t n, DType dtype, ReduceOp op, int salt) {
  Values result;
  for (std::int64_t i = 0; i < n; ++i) {
    double x = value_at(0, i, dtype, salt);
    for (int r = 1; r < world; ++r) x = apply(op, x, value_at(r, i, dtype, salt));
    result.push_back(op == ReduceOp::mean ? x / world : x);
  }
  return Tensor::from(result, {n}, dtype).to_vector();
}

void check_reductions(const ProcessGroup& group, std::int64_t n, DType dtype) {
  const int world = group.world_size(), rank = group.rank(), root = world - 1;
  for (const ReduceOp op : operations_on(dtype)) {
    SCOPED_TRACE(core::str(parallel::name(op), " of ", n, " ", dtype));
    const Tensor x = pattern(rank, n, dtype);
    const Values before = x.to_vector();
    const Tensor y = rank == root ? Tensor::zeros({n}, dtype) : Tensor();
    group.reduce(x, rank == root ? y.view() : TensorView{}, root, op, "reduce");
    if (rank == root) {
      EXPECT_EQ(y.to_vector(), reduced(world, n, dtype, op));
    }
    EXPECT_EQ(x.to_vector(), before);
    group.all_reduce(x, op, "all_reduce");
    EXPECT_EQ(x.to_vector(), reduced(world, n, dtype, op));

    const Tensor whole = pattern(rank, n * world, dtype), part = Tensor::zeros({n}, dtype);
    group.reduce_scatter(whole, part, op, "reduce_scatter");
    EXPECT_EQ(part.to_vector(), part_of(reduced(world, n * world, dtype, op),
                                        Counts(static_cast<std::size_t>(world), n), rank));
  }
}

void check_movements(const ProcessGroup& group, std::int64_t n, DType dtype) {
  SCOPED_TRACE(core::str(n, " ", dtype));
  const int world = group.world_size(), rank = group.rank();
  const Counts counts(static_cast<std::size_t>(world), n);
  const Values everything = all_patterns(counts, dtype);
  const Tensor x = pattern(rank, n, dtype), all = Tensor::zeros({world, n}, dtype);
  group.all_gather(x, all, "all_gather");
  EXPECT_EQ(all.to_vector(), everything);
  for (int root = 0; root < world; ++root) {
    const Tensor y = pattern(rank, n, dtype);
    group.broadcast(y, root, "broadcast");
    EXPECT_EQ(y.to_vector(), pattern(root, n, dtype).to_vector());

    const Tensor gathered = rank == root ? Tensor::zeros({world * n}, dtype) : Tensor();
    group.gather(x, rank == root ? gathered.view() : TensorView{}, root, "gather");
    if (rank == root) {
      EXPECT_EQ(gathered.to_vector(), everything);
    }
    const Tensor parts = rank == root ? pattern(root, world * n, dtype) : Tensor();
    const Tensor mine = Tensor::zeros({n}, dtype);
    group.scatter(rank == root ? parts.view() : TensorView{}, mine, root, "scatter");
    EXPECT_EQ(mine.to_vector(), part_of(pattern(root, world * n, dtype).to_vector(), counts, rank));
  }
  const Tensor from = pattern(rank, world * n, dtype), to = Tensor::zeros({world * n}, dtype);
  group.all_to_all(from, to, "all_to_all");
  Values expected;
  for (int r = 0; r < world; ++r) {
    const Values part = part_of(pattern(r, world * n, dtype).to_vector(), counts, rank);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(to.to_vector(), expected);
}

void check_uneven(const ProcessGroup& group, std::int64_t n, DType dtype) {
  SCOPED_TRACE(core::str("uneven ", n, " ", dtype));
  const int world = group.world_size(), rank = group.rank(), root = world / 2;
  const Counts counts = uneven_counts(world, n);
  const std::int64_t own = counts[static_cast<std::size_t>(rank)], total = sum(counts);
  const Values everything = all_patterns(counts, dtype);
  const Tensor x = pattern(rank, own, dtype), all = Tensor::zeros({total}, dtype);
  group.all_gather(x, all, counts, "all_gather");
  EXPECT_EQ(all.to_vector(), everything);

  const Tensor gathered = rank == root ? Tensor::zeros({total}, dtype) : Tensor();
  group.gather(x, rank == root ? gathered.view() : TensorView{}, counts, root, "gather");
  if (rank == root) {
    EXPECT_EQ(gathered.to_vector(), everything);
  }

  const Tensor parts = rank == root ? pattern(root, total, dtype) : Tensor();
  const Tensor mine = Tensor::zeros({own}, dtype);
  group.scatter(rank == root ? parts.view() : TensorView{}, mine, counts, root, "scatter");
  EXPECT_EQ(mine.to_vector(), part_of(pattern(root, total, dtype).to_vector(), counts, rank));

  const Tensor whole = pattern(rank, total, dtype);
  group.reduce_scatter(whole, mine, counts, ReduceOp::max, "reduce_scatter");
  EXPECT_EQ(mine.to_vector(), part_of(reduced(world, total, dtype, ReduceOp::max), counts, rank));

  // Rank a sends counts[(a + b) % world] to rank b: what a rank sends and gets is not the same
  // list.
  const auto sends_of = [&](int a) {
    Counts sends;
    for (int b = 0; b < world; ++b)
      sends.push_back(counts[static_cast<std::size_t>((a + 2 * b) % world)]);
    return sends;
  };
  const Counts sends = sends_of(rank);
  Counts receives;
  Values expected;
  for (int r = 0; r < world; ++r) {
    receives.push_back(sends_of(r)[static_cast<std::size_t>(rank)]);
    const Values part = part_of(pattern(r, sum(sends_of(r)), dtype).to_vector(), sends_of(r), rank);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const Tensor from = pattern(rank, sum(sends), dtype), to = Tensor::zeros({sum(receives)}, dtype);
  group.all_to_all(from, sends, to, receives, "all_to_all");
  EXPECT_EQ(to.to_vector(), expected);
}

void check_pairs(const ProcessGroup& group) {
  const int world = group.world_size(), rank = group.rank();
  if (world == 1) return;
  for (const std::int64_t n : {0, 1, 1000, 400'001}) {
    const Tensor x = pattern(rank, n, DType::f32), y = Tensor::zeros({n});
    // A ring: even ranks send first. Then one pair alone.
    const int next = (rank + 1) % world, before = (rank + world - 1) % world;
    const bool first = rank % 2 == 0;
    if (first) group.send(x, next, 7, "ring");
    group.recv(y, before, 7, "ring");
    if (!first) group.send(x, next, 7, "ring");
    EXPECT_EQ(y.to_vector(), pattern(before, n, DType::f32).to_vector());
    for (int i = 0; i < 3; ++i) {
      const Tensor z = pattern(0, n, DType::i64, i), got = Tensor::zeros({n}, DType::i64);
      if (rank == 0) group.send(z, world - 1, static_cast<std::uint64_t>(i), "pair");
      if (rank != world - 1) continue;
      group.recv(got, 0, static_cast<std::uint64_t>(i), "pair");
      EXPECT_EQ(got.to_vector(), z.to_vector());
    }
    const Tensor sum = Tensor::full({1}, 1.0);
    group.all_reduce(sum, ReduceOp::sum, "between");  // collectives go on with their own numbers
    EXPECT_EQ(sum.to_vector(), Values{static_cast<double>(world)});
  }
}

void check_collectives(const ProcessGroup& group) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t n : {0, 1, 17, 5003}) {
      check_reductions(group, n, dtype);
      check_movements(group, n, dtype);
    }
    for (const std::int64_t n : {0, 3, 9001}) check_uneven(group, n, dtype);
  }
  check_reductions(group, 300'001, DType::f16);
  check_movements(group, 300'001, DType::f32);
  check_uneven(group, 300'001, DType::u8);
  group.barrier("between");
  const Tensor large = pattern(group.rank(), 2'200'003, DType::f32);  // several segments
  group.all_reduce(large, ReduceOp::sum, "large");
  EXPECT_EQ(large.to_vector(), reduced(group.world_size(), 2'200'003, DType::f32, ReduceOp::sum));
  check_pairs(group);
  group.barrier("end");
}

}  // namespace cairn::test
