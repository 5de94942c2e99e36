// PowerSGD as a reducer's hook: how far what it sends is from the mean, and its state.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "cairn/checkpointing/training_state.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/reducer.h"
#include "ddp_support.h"
#include "ranks.h"

namespace cairn::parallel {
namespace {

using test::normal;
using test::run_threads;

/// Runs PowerSGD over matrices of its own; returns what ranks got and the truth, summed over
/// passes.
struct Course {
  std::vector<double> got, truth;
};
Course power_sgd_course(const PowerSgdOptions& options, int passes, std::int64_t rows,
                        std::int64_t columns) {
  Course course;
  run_threads(3, [&](ProcessGroup& group) {
    const NamedTensors gradients = {{"w", Tensor::empty({rows, columns})},
                                    {"b", Tensor::empty({rows})}};
    Reducer reducer(group, {.hook = power_sgd(options)});
    reducer.register_gradients(gradients);
    Course own;
    for (int pass = 0; pass < passes; ++pass) {
      for (std::size_t i = 0; i < 2; ++i) {
        const Tensor& x = gradients[i].tensor;
        const std::size_t at = i == 0 ? 0 : static_cast<std::size_t>(rows * columns);
        own.truth.resize(static_cast<std::size_t>(rows * columns + rows), 0.0);
        own.got.resize(own.truth.size(), 0.0);
        for (int rank = 0; rank < 3; ++rank) {
          // One drift that stays and noise that does not.
          const Tensor drift = normal(x.shape(), 70 + i);
          const Tensor noise =
              normal(x.shape(), 1000 + static_cast<std::uint64_t>(30 * pass + 10 * rank) + i);
          const auto a = drift.to_vector<double>(), b = noise.to_vector<double>();
          for (std::size_t k = 0; k < a.size(); ++k) own.truth[at + k] += (a[k] + 0.5 * b[k]) / 3;
          if (rank != group.rank()) continue;
          std::vector<float> sum(a.size());
          for (std::size_t k = 0; k < a.size(); ++k) sum[k] = static_cast<float>(a[k] + 0.5 * b[k]);
          kernels::copy(Tensor::from(sum, x.shape()), x);
        }
        reducer.mark_ready(i);
      }
      reducer.wait();
      for (std::size_t i = 0; i < 2; ++i) {
        const std::size_t at = i == 0 ? 0 : static_cast<std::size_t>(rows * columns);
        const auto values = gradients[i].tensor.to_vector<double>();
        for (std::size_t k = 0; k < values.size(); ++k) own.got[at + k] += values[k];
      }
    }
    if (group.rank() == 0) course = own;
  });
  return course;
}

double distance(const Course& course) {
  double square = 0;
  for (std::size_t i = 0; i < course.got.size(); ++i)
    square += (course.got[i] - course.truth[i]) * (course.got[i] - course.truth[i]);
  return std::sqrt(square);
}

TEST(PowerSgd, IsExactAtFullRank) {
  for (const auto& [rows, columns] :
       {std::pair<std::int64_t, std::int64_t>{9, 5}, {5, 9}, {7, 7}}) {
    for (const int rank : {static_cast<int>(std::min(rows, columns)), 50}) {
      const PowerSgdOptions options{.rank = rank, .start_step = 0, .min_compression_rate = 0.0};
      const Course course = power_sgd_course(options, 4, rows, columns);
      for (std::size_t i = 0; i < course.got.size(); ++i)
        ASSERT_NEAR(course.got[i], course.truth[i], 2e-5) << rows << " x " << columns << " " << i;
    }
  }
}

// The file that the state came from is closed by then.
TEST(PowerSgd, GoesOnFromATrainingState) {
  std::string folder = "/tmp/cairn_power_sgd_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  run_threads(2, [&](ProcessGroup& group) {
    const PowerSgdOptions options{.rank = 9, .start_step = 1, .min_compression_rate = 0.0};
    nn::Sequential model(nn::Linear(3, 2));
    DistributedDataParallel ddp(model, group, {.hook = power_sgd(options)});
    const auto backward = [&] {
      autograd::backward(autograd::sum(ddp(Tensor::full({2, 3}, 1.0 + group.rank()))));
    };
    backward();
    backward();
    checkpointing::TrainingState state({{"model", model}, {"ddp", ddp}}, group.world());
    state.save(folder, 1);
    state.resume(folder + "/step-00000001");
    model.clear_grad();
    backward();
    for (const double g : model.parameters()[0].tensor.grad().to_vector<double>()) {
      EXPECT_NEAR(g, 3.0, 1e-5);  // of 2 samples: 2 on rank 0, 4 on rank 1
    }
  });
  std::filesystem::remove_all(folder);
}

// An overflow, which amp answers with a skipped step, must not stay in what is fed back.
TEST(PowerSgd, ForgetsAnOverflow) {
  run_threads(2, [](ProcessGroup& group) {
    const Tensor w = Tensor::empty({5, 4});
    const auto hook = power_sgd({.rank = 4, .start_step = 0, .min_compression_rate = 0.0});
    Reducer reducer(group, {.hook = hook});
    reducer.register_gradients({{"w", w}});
    for (std::uint64_t pass = 0; pass < 4; ++pass) {
      std::vector<double> mean(20, 0.0);
      const bool overflows = pass == 1;
      for (int rank = 0; rank < 2; ++rank) {
        const Tensor own = normal(w.shape(), 40 + 2 * pass + static_cast<std::uint64_t>(rank));
        auto values = own.to_vector<double>();
        for (std::size_t k = 0; k < mean.size(); ++k) mean[k] += values[k] / 2;
        if (overflows && rank == 1) values[7] = std::numeric_limits<double>::infinity();
        if (rank == group.rank()) kernels::copy(Tensor::from(values, w.shape()), w);
      }
      reducer.mark_ready(0);
      reducer.wait();
      const auto got = w.to_vector<double>();
      if (overflows) {
        EXPECT_TRUE(
            std::any_of(got.begin(), got.end(), [](double v) { return !std::isfinite(v); }));
        EXPECT_EQ(hook->state_dict(true).size(), 0u);
        continue;
      }
      for (std::size_t k = 0; k < mean.size(); ++k) ASSERT_NEAR(got[k], mean[k], 2e-5) << pass;
    }
  });
}

TEST(PowerSgd, TravelsExactlyBeforeItsStartAndWhereNothingIsSaved) {
  const Course before = power_sgd_course({.rank = 1, .start_step = 3}, 3, 20, 20);
  EXPECT_LT(distance(before), 1e-4);
  const Course small = power_sgd_course({.rank = 1, .start_step = 0}, 3, 4, 4);  // 8 * 2 >= 16
  EXPECT_LT(distance(small), 1e-4);
}

/// What error feedback promises: the sum of what was applied stays within one error of the truth,
/// however many passes there were; without it the distance grows with them.
TEST(PowerSgd, ErrorFeedbackSumsToTheTruth) {
  const auto course = [](bool feedback, int passes) {
    return distance(power_sgd_course(
        {.rank = 2, .start_step = 0, .error_feedback = feedback, .warm_start = true}, passes, 16,
        16));
  };
  const double early = course(true, 40), late = course(true, 160);
  const double without = course(false, 160);
  EXPECT_GT(early, 0.1);  // it does compress
  EXPECT_LT(late, 2 * early);
  EXPECT_GT(without, 5 * late);
}

/// What rank 0 of two has after each pass over gradients that both ranks have.
std::vector<std::vector<double>> passes_of(const PowerSgdOptions& options,
                                           const std::vector<Tensor>& gradients) {
  std::vector<std::vector<double>> results;
  run_threads(2, [&](ProcessGroup& group) {
    const Tensor x = Tensor::empty_strided(gradients[0].shape(), gradients[0].strides(), DType::f32,
                                           core::default_device());
    Reducer reducer(group, {.hook = power_sgd(options)});
    reducer.register_gradients({{"w", x}});
    for (const Tensor& gradient : gradients) {
      kernels::copy(gradient, x);
      reducer.mark_ready(0);
      reducer.wait();
      if (group.rank() == 0) results.push_back(x.to_vector());
    }
  });
  return results;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

/// The outer product of two normal vectors, [m, n].
Tensor outer(std::int64_t m, std::int64_t n, std::uint64_t seed) {
  const Tensor y = Tensor::empty({m, n});
  kernels::binary(kernels::BinaryOp::mul, normal({m, 1}, seed), normal({1, n}, seed + 1), y);
  return y;
}

TEST(PowerSgd, LooksElsewhereInEachPassWithoutAWarmStart) {
  const Tensor x = normal({12, 12}, 3);
  const auto results =
      passes_of({.rank = 1, .start_step = 0, .error_feedback = false, .warm_start = false}, {x, x});
  EXPECT_GT(largest_difference(results[0], results[1]), 0.01);
}

TEST(PowerSgd, FindsADirectionThatGradientsHadNot) {
  const Tensor one = outer(12, 12, 3), both = Tensor::empty_like(one);
  kernels::binary(kernels::BinaryOp::add, one, outer(12, 12, 7), both);
  const auto results =
      passes_of({.rank = 2, .start_step = 0, .error_feedback = false, .warm_start = true},
                {one, one, both, both, both, both});
  EXPECT_LT(largest_difference(results.back(), both.to_vector()), 1e-3);
}

// Its columns are its memory's rows: of these, no two are alike.
TEST(PowerSgd, SendsATransposedWeightExactly) {
  const Tensor stored = normal({12, 24}, 3);
  const Tensor x = stored.alias(stored.view().transpose(0, 1));
  const auto results = passes_of({.rank = 1, .start_step = 0}, {x});
  EXPECT_LT(largest_difference(results[0], x.to_vector()), 1e-6);
}

TEST(PowerSgd, GoesOnFromItsStateWithTheSameBits) {
  run_threads(2, [](ProcessGroup& group) {
    const auto pass = [&](Reducer& reducer, const Tensor& x, std::uint64_t number) {
      const auto seed = 10 * number + static_cast<std::uint64_t>(group.rank());
      kernels::copy(normal(x.shape(), seed), x);
      reducer.mark_ready(0);
      reducer.wait();
      return x.to_vector<float>();
    };
    const PowerSgdOptions options{.rank = 2, .start_step = 1};
    const auto hook = power_sgd(options), resumed_hook = power_sgd(options);
    const NamedTensors one = {{"w", Tensor::empty({16, 16})}};
    const NamedTensors other = {{"w", Tensor::empty({16, 16})}};
    Reducer reducer(group, {.hook = hook}), resumed(group, {.hook = resumed_hook});
    reducer.register_gradients(one);
    resumed.register_gradients(other);
    for (std::uint64_t k = 0; k < 3; ++k) pass(reducer, one[0].tensor, k);
    resumed.load_state_dict(reducer.state_dict());
    resumed_hook->load_state_dict(hook->state_dict(true));  // this rank's errors too
    EXPECT_EQ(pass(reducer, one[0].tensor, 3), pass(resumed, other[0].tensor, 3));
  });
}

}  // namespace
}  // namespace cairn::parallel
