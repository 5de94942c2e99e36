// SyncBatchNorm: ranks with parts of a batch against the whole batch, in double.
#include "cairn/parallel/sync_batch_norm.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

#include "cairn/autograd/autograd.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/distributed.h"
#include "parallel/ranks.h"
#include "support/batch_norm_reference.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using test::epsilon;
using test::expect_close;
using test::random_tensor;
using test::rows_of;
using test::run_ranks;
using test::run_threads;
using testing::HasSubstr;
using Reference = test::BatchNormReference;
using Values = std::vector<double>;

constexpr double kEps = 1e-3;
constexpr Device kCpu{};

struct Case {
  Shape shape;                     // the whole batch
  std::vector<std::int64_t> ends;  // of the ranks' samples
  DType dtype = DType::f32;
  bool channels_last = false, relu = false, affine = true, adds = false;
};

std::string name_of(const Case& c) {
  return core::str(c.shape, " ", c.ends.size(), " ranks ", c.dtype,
                   c.channels_last ? " channels-last" : "", c.relu ? " relu" : "",
                   c.affine ? "" : " no affine", c.adds ? " z" : "");
}

Tensor rank_tensor(const Values& whole, const Case& c, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  const std::int64_t begin = r == 0 ? 0 : c.ends[r - 1], end = c.ends[r];
  Shape shape = c.shape;
  shape[0] = end - begin;
  const Tensor x = Tensor::from(rows_of(whole, c.shape, begin, end), shape, c.dtype);
  return c.channels_last && end > begin ? autograd::channels_last(x).detach() : x;
}

/// Values that every rank can make, and what comes of them.
Reference reference_of(const Case& c) {
  Reference r{.shape = c.shape, .eps = kEps};
  const auto channels = c.shape[1];
  const auto values = [&](std::uint64_t seed, double low, double high) {
    return random_tensor(c.shape, c.dtype, kCpu, seed, low, high).to_vector();
  };
  r.x = values(1, 3.0, 5.0), r.dy = values(2, -1.0, 1.0);
  if (c.adds) r.z = values(3, -1.0, 1.0);
  r.weight = c.affine ? test::random_values(channels, 4, 0.5, 1.5) : Values(r.channels(), 1.0);
  r.bias = c.affine ? test::random_values(channels, 5) : Values(r.channels(), 0.0);
  r.relu = c.relu;
  r.run();
  return r;
}

/// The sum over the ranks, of f32 values.
Values summed(const Tensor& x, const ProcessGroup& group) {
  const Tensor sum = Tensor::from(x.to_vector(), x.shape(), DType::f32);
  group.all_reduce(sum);
  return sum.to_vector();
}

/// One rank's part.
void check_on(const ProcessGroup& group, const Case& c) {
  const std::string what = name_of(c);
  const Reference r = reference_of(c);
  const std::int64_t channels = c.shape[1];
  const double loose = 2.0 * epsilon(c.dtype);
  SyncBatchNorm norm(channels, group, {.eps = kEps, .affine = c.affine, .relu = c.relu});
  if (c.affine) {
    kernels::copy(Tensor::from(r.weight, {channels}, DType::f32), norm.weight());
    kernels::copy(Tensor::from(r.bias, {channels}, DType::f32), norm.bias());
  }
  Tensor x = rank_tensor(r.x, c, group.rank());
  x.set_requires_grad(true);
  const Tensor y = c.adds ? norm.forward(x, rank_tensor(r.z, c, group.rank())) : norm(x);
  autograd::backward(y, rank_tensor(r.dy, c, group.rank()));
  const auto rank = static_cast<std::size_t>(group.rank());
  const std::int64_t begin = rank == 0 ? 0 : c.ends[rank - 1], end = c.ends[rank];
  const auto own = [&](const Values& v) { return rows_of(v, c.shape, begin, end); };
  expect_close(y, own(r.y), loose, loose + 2e-6, what + " y");
  expect_close(x.grad(), own(r.dx), loose, loose + 4e-6, what + " dx");
  for (std::size_t i = 0; i < r.channels(); ++i) {
    const double unbiased = r.var[i] * r.count() / (r.count() - 1.0);
    EXPECT_NEAR(norm.running_mean().to_vector()[i], 0.1 * r.mean[i], 1e-6) << what;
    EXPECT_NEAR(norm.running_var().to_vector()[i], 0.9 + 0.1 * unbiased, 1e-6) << what;
  }
  if (!c.affine) return;
  const Values dweight = summed(norm.weight().grad(), group);
  const Values dbias = summed(norm.bias().grad(), group);
  expect_close(dweight, r.dweight, 1e-5, 1e-4 + 30.0 * loose, what + " dweight");
  expect_close(dbias, r.dbias, 1e-5, 1e-4 + 30.0 * loose, what + " dbias");
}

void check(const Case& c) {
  run_threads(static_cast<int>(c.ends.size()),
              [&](const ProcessGroup& group) { check_on(group, c); });
}

TEST(SyncBatchNorm, EqualsTheWholeBatchOnOneTwoAndFourRanks) {
  for (const std::vector<std::int64_t>& ends :
       {std::vector<std::int64_t>{8}, {4, 8}, {2, 4, 6, 8}}) {
    for (const bool relu : {false, true}) {
      for (const bool last : {false, true}) {
        check({{8, 10, 5, 7}, ends, DType::f32, last, relu});
      }
      check({{8, 5}, ends, DType::f32, false, relu});
    }
  }
}

TEST(SyncBatchNorm, UnevenAndEmptyBatches) {
  check({{24, 3, 8, 8}, {16, 24}});
  check({{9, 6}, {1, 1, 8, 9}, DType::f32, false, true});
  check({{6, 4, 3, 3}, {0, 6}, DType::f32, true});
  check({{2, 7}, {1, 2}});  // one value a channel on each rank, two together
}

TEST(SyncBatchNorm, HalfInputsHaveF32Statistics) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    check({{8, 6, 9, 9}, {3, 8}, dtype, true, true});
    check({{32, 6}, {16, 32}, dtype});
  }
}

TEST(SyncBatchNorm, WithoutAffineAndWithASum) {
  check({{6, 4, 5, 5}, {3, 6}, DType::f32, true, true, false});
  check({{6, 4, 5, 5}, {3, 6}, DType::f32, true, true, true, true});
  check({{6, 4}, {2, 6}, DType::f32, false, false, true, true});
}

// Values of rank 1 are 50 times larger, around another mean: what averaging variances gets wrong.
TEST(SyncBatchNorm, MeansThatDifferBetweenRanks) {
  const Values a = test::random_values(16 * 3, 1), b = test::random_values(8 * 3, 2, 900, 1000);
  Values all = a;
  all.insert(all.end(), b.begin(), b.end());
  Reference r{.shape = {24, 3},
              .x = all,
              .dy = Values(all.size(), 1.0),
              .weight = Values(3, 1.0),
              .bias = Values(3, 0.0),
              .eps = kEps};
  r.run();
  run_threads(2, [&](ProcessGroup& group) {
    SyncBatchNorm norm(3, group, {.eps = kEps, .momentum = 1.0});
    const bool first = group.rank() == 0;
    const Tensor y = norm(Tensor::from(first ? a : b, {first ? 16 : 8, 3}, DType::f32));
    expect_close(y, rows_of(r.y, r.shape, first ? 0 : 16, first ? 16 : 24), 1e-5, 1e-5, "y");
    expect_close(norm.running_mean(), r.mean, 1e-6, 0.0, "mean");
  });
}

TEST(SyncBatchNorm, ASecondBackwardAddsToTheGradientsOfTheFirst) {
  run_threads(2, [](ProcessGroup& group) {
    SyncBatchNorm norm(3, group);
    const auto backward = [&](std::uint64_t seed) {
      const auto rank = static_cast<std::uint64_t>(group.rank());
      const Tensor y = norm(random_tensor({4, 3}, DType::f32, norm.parameters()[0].tensor.device(),
                                          10 * seed + rank));
      autograd::backward(autograd::sum(y * y * y));
    };
    const auto gradients = [&] {
      Values all;
      for (const auto& [name, tensor] : norm.parameters()) {
        for (const double value : tensor.grad().to_vector()) all.push_back(value);
      }
      return all;
    };
    backward(1);
    const Values first = gradients();
    norm.clear_grad();
    backward(2);
    const Values second = gradients();
    norm.clear_grad();
    for (const std::uint64_t seed : {1, 2}) backward(seed);
    const Values both = gradients();
    for (std::size_t i = 0; i < both.size(); ++i) EXPECT_NEAR(both[i], first[i] + second[i], 1e-5);
  });
}

TEST(SyncBatchNorm, SubgroupsKeepToThemselves) {
  std::vector<ProcessGroup> pairs[2];
  for (auto& pair : pairs) pair = ProcessGroup::in_process(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i, group = pairs[i / 2][static_cast<std::size_t>(i % 2)]] {
      SyncBatchNorm norm(1, group, {.momentum = 1.0});
      const double low = i / 2 == 0 ? 0.0 : 100.0;
      norm(Tensor::from(Values{low + i % 2, low + i % 2}, {2, 1}, DType::f32));
      EXPECT_NEAR(norm.running_mean().item(), low + 0.5, 1e-5);
      EXPECT_NEAR(norm.running_var().item(), 1.0 / 3.0, 1e-5);
    });
  }
  for (auto& pair : pairs) pair.clear();
  for (std::thread& thread : threads) thread.join();
}

TEST(SyncBatchNorm, EvaluationUsesRunningStatisticsAndTalksToNobody) {
  run_threads(2, [](ProcessGroup& group) {
    SyncBatchNorm norm(2, group, {.eps = 0.0});
    norm.eval();
    if (group.rank() == 1) return;  // a collective would fail
    kernels::fill(norm.running_mean(), 3.0);
    kernels::fill(norm.running_var(), 4.0);
    const Tensor y = norm(Tensor::from(Values{5.0, 1.0}, {1, 2}, DType::f32));
    EXPECT_EQ(y.to_vector(), (Values{1.0, -1.0}));
  });
}

void average_all_batches(const ProcessGroup& group) {  // of two ranks
  SyncBatchNorm norm(1, group, {.momentum = std::nullopt});
  double mean = 0.0;
  for (int step = 1; step <= 3; ++step) {
    const double a = step * step, b = 10.0 * step;
    norm(Tensor::from(Values{group.rank() == 0 ? a : b}, {1, 1}, DType::f32));
    mean += (a + b) / 2.0 / 3.0;
  }
  EXPECT_NEAR(norm.running_mean().item(), mean, 1e-5);
  EXPECT_EQ(norm.state_dict().tensor("num_batches_tracked").item(), 3.0);
  SyncBatchNorm later(1, group, {.momentum = std::nullopt});
  later.load_state_dict(norm.state_dict());
  later(Tensor::from(Values{group.rank() == 0 ? 0.0 : 2.0}, {1, 1}, DType::f32));
  EXPECT_NEAR(later.running_mean().item(), (3.0 * mean + 1.0) / 4.0, 1e-5);
}

TEST(SyncBatchNorm, NoMomentumAveragesAllBatches) {
  run_threads(2, average_all_batches);
}

nn::Sequential conv_net() {
  manual_seed(5);
  nn::Sequential tail(nn::Linear(6 * 4 * 4, 7), nn::BatchNorm1d(7), nn::ReLU(), nn::Linear(7, 3));
  return nn::Sequential(nn::Conv2d(2, 6, 3, {.padding = 1}), nn::BatchNorm2d(6, {.relu = true}),
                        nn::MaxPool2d(2), nn::Flatten(), std::move(tail));
}

constexpr std::int64_t kImages = 8;
Tensor images() {
  return test::random_tensor({kImages, 2, 8, 8}, DType::f32, core::default_device(), 11);
}
Tensor answers() {
  return test::random_tensor({kImages, 3}, DType::f32, core::default_device(), 12);
}
Tensor part(const Tensor& whole, const ProcessGroup& group) {
  const std::int64_t each = whole.size(0) / group.world_size();
  return autograd::slice(whole, 0, group.rank() * each, (group.rank() + 1) * each).detach();
}

void train(nn::Module& model, optim::Optimizer& optimizer, const Tensor& x, const Tensor& y,
           const std::function<Tensor(const Tensor&)>& forward) {
  autograd::backward(nn::mse_loss(forward(x), y));
  test::expect_applied(optimizer.step());
  (void)model;
}

// The optimizer is made before the conversion: it must still hold the parameters.
void train_as_one_process(const ProcessGroup& group) {
  nn::Sequential alone = conv_net();
  optim::FusedSGD sgd(alone.parameters(), {.lr = 0.1, .momentum = 0.9});
  nn::Sequential model = conv_net();
  optim::FusedSGD own(model.parameters(), {.lr = 0.1, .momentum = 0.9});
  EXPECT_EQ(convert_sync_batch_norm(model, group), 2);
  DistributedDataParallel ddp(model, group);
  for (int step = 0; step < 3; ++step) {
    train(alone, sgd, images(), answers(), [&](const Tensor& x) { return alone(x); });
    train(model, own, part(images(), group), part(answers(), group),
          [&](const Tensor& x) { return ddp(x); });
  }
  const auto expect_same = [&](const NamedTensors& got, const NamedTensors& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].name, expected[i].name);
      expect_close(got[i].tensor, expected[i].tensor.to_vector(), 1e-4, 2e-5,
                   core::str(group.world_size(), " ranks, ", got[i].name));
    }
  };
  expect_same(model.parameters(), alone.parameters());
  expect_same(model.buffers(), alone.buffers());
}

TEST(SyncBatchNorm, ConvertedModelTrainsAsOneProcessOnTheWholeBatch) {
  for (const int world : {1, 2, 4}) run_threads(world, train_as_one_process);
}

TEST(SyncBatchNorm, ConversionKeepsTensorsNamesAndModeAndClones) {
  nn::Sequential model = conv_net();
  const NamedTensors before = model.parameters(), buffers = model.buffers();
  model.eval();
  EXPECT_EQ(convert_sync_batch_norm(model, ProcessGroup::single()), 2);
  const NamedTensors after = model.parameters(), buffers_after = model.buffers();
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].name, after[i].name);
    EXPECT_TRUE(before[i].tensor.same(after[i].tensor));
  }
  ASSERT_EQ(buffers.size(), buffers_after.size());
  for (const auto& [name, module] : model.modules()) EXPECT_FALSE(module->training());
  conv_net().load_state_dict(model.state_dict());
  const auto copy = model.clone();
  int converted = 0;
  for (const auto& [name, module] : copy->modules()) {
    const auto* norm = dynamic_cast<const nn::BatchNorm*>(module);
    converted += norm != nullptr && norm->has_training_function() ? 1 : 0;
  }
  EXPECT_EQ(converted, 2);
}

template <class F>
std::string sync_batch_norm_error_of(F&& f) {
  try {
    f();
  } catch (const core::InvalidArgument& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(SyncBatchNorm, OneValueOverAllRanksIsAnErrorOnEachOfThem) {
  run_threads(3, [](ProcessGroup& group) {
    SyncBatchNorm norm(2, group);
    const Tensor x = Tensor::zeros({group.rank() == 1 ? 1 : 0, 2});
    EXPECT_THAT(sync_batch_norm_error_of([&] { norm(x); }),
                HasSubstr("more than one value per channel to train on over all ranks, got one"));
  });
  SyncBatchNorm alone(2, ProcessGroup::single());
  EXPECT_THAT(sync_batch_norm_error_of([&] {
                alone(Tensor::zeros({1, 2}));
              }),
              HasSubstr("more than one value"));
  EXPECT_THAT(
      sync_batch_norm_error_of([&] {
        alone(Tensor::zeros({4, 3}));
      }),
      HasSubstr("expected x [N, 2] or [N, 2, L] or [N, 2, H, W] or [N, 2, D, H, W], got [4, 3]"));
}

TEST(SyncBatchNorm, RanksThatDifferInChannelsAreNamed) {
  auto groups = ProcessGroup::in_process(2, {.timeout = std::chrono::seconds(5)});
  std::vector<std::thread> threads;
  for (auto& one : groups) {
    threads.emplace_back([group = std::move(one)] {
      const std::int64_t channels = group.rank() + 2;
      SyncBatchNorm norm(channels, group);
      try {
        norm(Tensor::zeros({4, channels}));
        ADD_FAILURE() << "nothing thrown";
      } catch (const core::CommunicationError& error) {
        EXPECT_THAT(error.what(), HasSubstr("sync_batch_norm"));
      }
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
}

// ---- Between processes

TEST(SyncBatchNorm, OnProcesses) {
  run_ranks(4, [](const ProcessGroup& group) {
    check_on(group, {{8, 10, 5, 7}, {2, 4, 6, 8}, DType::f32, false, true});
    check_on(group, {{9, 6}, {1, 1, 8, 9}, DType::f32, false, true});  // uneven, one empty
    check_on(group, {{6, 4, 3, 3}, {0, 0, 6, 6}, DType::f32, true});
    check_on(group, {{4, 7}, {1, 2, 3, 4}});  // one value a channel on each rank
    for (const DType dtype : {DType::f16, DType::bf16}) {
      check_on(group, {{8, 6, 9, 9}, {3, 4, 4, 8}, dtype, true, true});
    }
    check_on(group, {{6, 4, 5, 5}, {1, 3, 5, 6}, DType::f32, true, true, false});
    check_on(group, {{6, 4, 5, 5}, {1, 3, 5, 6}, DType::f32, true, true, true, true});
    train_as_one_process(group);
    SyncBatchNorm norm(2, group);
    const Tensor x = Tensor::zeros({group.rank() == 1 ? 1 : 0, 2});
    EXPECT_THAT(sync_batch_norm_error_of([&] { norm(x); }), HasSubstr("over all ranks, got one"));
  });
}

// Two groups at once, each with a batch of its own; their ranks in another order than the job's.
TEST(SyncBatchNorm, SubgroupsOnProcesses) {
  run_ranks(4, [](const ProcessGroup& group) {
    const int color = group.rank() % 2;
    const ProcessGroup pair = group.split(color, -group.rank());
    ASSERT_EQ(pair.world_size(), 2);
    EXPECT_EQ(pair.rank(), group.rank() < 2 ? 1 : 0);
    for (int round = 0; round < 3; ++round) {
      if (color == 0) {
        check_on(pair, {{6, 5, 3, 3}, {1, 6}, DType::f32, true, true});
      } else {
        check_on(pair, {{7, 3}, {7, 7}});
      }
    }
    average_all_batches(pair);
    check_on(group, {{8, 5}, {2, 4, 6, 8}});  // and the job's own afterwards
    const ProcessGroup one = group.split(group.rank());
    check_on(one, {{4, 5}, {4}});
  });
}

}  // namespace
}  // namespace cairn::parallel
