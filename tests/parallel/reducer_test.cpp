// The reducer alone: buckets, options, hooks, mistakes. The oracle is a mean that is computed here.
#include "cairn/parallel/reducer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <thread>

#include "cairn/amp/scaled_step.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/flatten.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::expect_error;
using test::normal;
using test::run_ranks;
using test::run_threads;

/// Gradients of one rank: three neighbours in a slice of a buffer, two alone, one of them half.
struct Trainer {
  Tensor buffer = Tensor::empty({4 + 6 + 5});
  std::vector<TensorView> views;
  std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  Tensor alone = Tensor::empty({3, 2}), half = Tensor::empty({7}, DType::bf16);

  Trainer() {
    const TensorView all = buffer;
    views = {all.slice(0, 0, 4), all.slice(0, 4, 10).reshape({2, 3}), all.slice(0, 10, 15), alone,
             half};
  }
  static std::vector<float> values(int rank, std::size_t gradient, const TensorView& like,
                                   std::uint64_t pass) {
    return normal({like.numel()}, 100 * pass + 10 * gradient + static_cast<std::uint64_t>(rank),
                  like.dtype)
        .to_vector<float>();
  }
  void write(int rank, std::uint64_t pass) {
    for (std::size_t i = 0; i < views.size(); ++i) write(rank, i, pass);
  }
  void write(int rank, std::size_t i, std::uint64_t pass) {
    const Tensor x = Tensor::from(values(rank, i, views[i], pass), views[i].shape, views[i].dtype);
    kernels::copy(x, views[i]);
  }
  std::vector<double> get(std::size_t i) const {
    const Tensor copy = Tensor::empty(views[i].shape, views[i].dtype);
    kernels::copy(views[i], copy);
    return copy.to_vector<double>();
  }
  void expect(int world, std::uint64_t pass, double divisor, double tolerance) const {
    for (std::size_t i = 0; i < views.size(); ++i) {
      const auto got = get(i);
      for (std::size_t k = 0; k < got.size(); ++k) {
        double sum = 0;
        for (int rank = 0; rank < world; ++rank) sum += values(rank, i, views[i], pass)[k];
        const double allowed =
            core::is_half(views[i].dtype) ? std::max(2e-2, tolerance) : tolerance;
        ASSERT_NEAR(got[k], sum / divisor, allowed) << names[i] << " " << k;
      }
    }
  }
};

void check_mean(ProcessGroup& group) {
  Trainer trainer;
  Reducer reducer(group, {.first_bucket_bytes = 40, .bucket_bytes = 40});
  reducer.register_gradients(trainer.names, trainer.views);
  for (std::uint64_t pass = 0; pass < 4; ++pass) {
    // Another order on each rank and in each pass: the collectives keep theirs.
    for (std::size_t k = 0; k < 5; ++k) {
      const std::size_t i = (k * 2 + pass + static_cast<std::size_t>(group.rank())) % 5;
      trainer.write(group.rank(), i, pass);
      reducer.mark_ready(i);
    }
    reducer.wait();
    trainer.expect(group.world_size(), pass, group.world_size(), 1e-6);
  }
}

TEST(Reducer, AveragesListsOfAnyLayout) {
  run_threads(1, check_mean);
  run_threads(2, check_mean);
  run_threads(4, check_mean);
}
TEST(Reducer, AveragesBetweenProcesses) {
  run_ranks(2, check_mean);
}

TEST(Reducer, ReducesNeighboursInPlaceAndOthersInAFlatBuffer) {
  Trainer trainer;
  const Tensor more = Tensor::empty({5});
  trainer.views.push_back(more);
  trainer.names.push_back("f");
  Reducer reducer(ProcessGroup::single());
  reducer.register_gradients(trainer.names, trainer.views);
  int in_place = 0;
  for (const auto& bucket : reducer.buckets()) {
    const auto& names = bucket.parameters;
    if (names == std::vector<std::string>{"c", "b", "a"}) {
      EXPECT_TRUE(bucket.in_place);
      EXPECT_EQ(bucket.bytes, 15 * 4);
    } else if (names == std::vector<std::string>{"f", "d"}) {
      EXPECT_FALSE(bucket.in_place);
      EXPECT_EQ(bucket.bytes, (6 + 5) * 4);
    } else {
      EXPECT_EQ(names, std::vector<std::string>{"e"});
      EXPECT_EQ(bucket.dtype, DType::bf16);
    }
    in_place += bucket.in_place ? 1 : 0;
  }
  EXPECT_EQ(reducer.buckets().size(), 3u);
  EXPECT_EQ(in_place, 2);
}

TEST(Reducer, EndsBucketsAtTriggers) {
  Trainer trainer;
  Reducer reducer(ProcessGroup::single(), {.trigger_parameters = {"b"}});
  reducer.register_gradients(trainer.names, trainer.views);
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : reducer.buckets()) names.push_back(bucket.parameters);
  EXPECT_THAT(names, testing::Contains(std::vector<std::string>{"b", "a"}));
  EXPECT_THAT(names, testing::Contains(std::vector<std::string>{"c"}));
}

TEST(Reducer, FollowsRankZerosOrderAndKeepsItInItsState) {
  run_threads(2, [](ProcessGroup& group) {
    const std::vector<std::size_t> order = {2, 0, 3, 1};
    NamedTensors gradients;
    for (const char* name : {"p", "q", "r", "s"})
      gradients.push_back({name, Tensor::full({8}, group.rank())});
    const ReducerOptions each{.first_bucket_bytes = 1, .bucket_bytes = 1};
    const auto names = [](const Reducer& reducer) {
      std::string all;
      for (const auto& bucket : reducer.buckets()) all += bucket.parameters.at(0);
      return all;
    };
    Reducer reducer(group, each);
    reducer.register_gradients(gradients);
    EXPECT_EQ(names(reducer), "srqp");
    for (std::size_t k = 0; k < 4; ++k)
      reducer.mark_ready(group.rank() == 0 ? order[k] : k);  // only rank 0's word counts
    reducer.wait();
    EXPECT_EQ(names(reducer), "rpsq");

    Reducer resumed(group, each);
    resumed.register_gradients(gradients);
    resumed.load_state_dict(reducer.state_dict());
    EXPECT_EQ(names(resumed), "rpsq");
    for (std::size_t k = 0; k < 4; ++k) resumed.mark_ready(k);
    resumed.wait();
    EXPECT_EQ(names(resumed), "rpsq");  // learnt once
  });
}

struct Case {
  const char* name;
  ReducerOptions options;
  bool sums = false;
  double tolerance = 1e-6;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({"delay", {.delay_allreduce = true}});
  all.push_back({"fp32", {.allreduce_always_fp32 = true}});
  all.push_back({"sum", {.average = false}, true});
  all.push_back({"predivide", {.gradient_predivide_factor = 3.0}});
  all.push_back(
      {"streams", {.first_bucket_bytes = 1, .bucket_bytes = 1, .num_allreduce_streams = 3}});
  all.push_back({"retain", {.retain_allreduce_buffers = true}});
  all.push_back({"f16", {.hook = compress_to(DType::f16)}, false, 2e-3});
  all.push_back({"bf16", {.hook = compress_to(DType::bf16)}, false, 2e-2});
  return all;
}

TEST(Reducer, EachOptionGivesTheMeanAndTheSameBitsInEveryRun) {
  for (const Case& option : cases()) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(option.name);
      std::vector<std::vector<double>> runs(2);
      for (auto& bits : runs) {
        run_threads(world, [&](ProcessGroup& group) {
          Trainer trainer;
          Reducer reducer(group, option.options);
          reducer.register_gradients(trainer.names, trainer.views);
          for (std::uint64_t pass = 0; pass < 2; ++pass) {
            trainer.write(group.rank(), pass);
            for (std::size_t i = 5; i-- > 0;) reducer.mark_ready(i);
            reducer.wait();
            trainer.expect(world, pass, option.sums ? 1 : world, option.tolerance * world);
          }
          if (group.rank() != 0) return;
          for (std::size_t i = 0; i < 5; ++i) {
            for (const double value : trainer.get(i)) bits.push_back(value);
          }
        });
      }
      EXPECT_EQ(runs[0], runs[1]);
      EXPECT_EQ(runs[0].size(), 4u + 6u + 5u + 6u + 7u);
    }
  }
}

TEST(Reducer, HoldsFlatBuffersForOnePassAtMost) {
  for (const bool retains : {false, true}) {
    run_threads(2, [&](ProcessGroup& group) {
      Trainer trainer;
      Reducer reducer(group, {.allreduce_always_fp32 = true, .retain_allreduce_buffers = retains});
      reducer.register_gradients(trainer.names, trainer.views);
      const auto bytes_after = [&](int passes) {
        for (int pass = 0; pass < passes; ++pass) {
          for (std::size_t i = 0; i < 5; ++i) reducer.mark_ready(i);
          reducer.wait();
        }
        group.barrier("passes");
        const std::size_t bytes = core::memory_stats(Device{}).current_total;
        group.barrier("looked");
        return bytes;
      };
      const std::size_t few = bytes_after(2), many = bytes_after(6);
      EXPECT_EQ(few, many) << retains;
    });
  }
}

TEST(Reducer, RetainsWhatItReduced) {
  run_threads(2, [](ProcessGroup& group) {
    Trainer trainer;
    Reducer reducer(
        group,
        {.delay_allreduce = true, .allreduce_always_fp32 = true, .retain_allreduce_buffers = true});
    reducer.register_gradients(trainer.names, trainer.views);
    trainer.write(group.rank(), 0);
    for (std::size_t i = 0; i < 5; ++i) reducer.mark_ready(i);
    reducer.wait();
    const auto buffers = reducer.reduced_buckets();
    ASSERT_EQ(buffers.size(), 3u);
    for (std::size_t b = 0; b < buffers.size(); ++b) {
      const auto described = reducer.buckets()[b];
      EXPECT_EQ(static_cast<std::int64_t>(buffers[b].nbytes()), described.bytes);
      EXPECT_EQ(buffers[b].dtype, DType::f32);
      if (described.parameters == std::vector<std::string>{"e"}) {
        EXPECT_FALSE(described.in_place);  // half gradients widened
        EXPECT_EQ(described.bytes, 7 * 4);
        const auto widened = Tensor::wrap(buffers[b]).to_vector<float>();
        for (std::size_t k = 0; k < widened.size(); ++k) {
          const float sum =
              Trainer::values(0, 4, trainer.half, 0)[k] + Trainer::values(1, 4, trainer.half, 0)[k];
          EXPECT_EQ(widened[k], sum / 2);  // not rounded to bf16
        }
      }
    }
  });
  Reducer reducer(ProcessGroup::single());
  expect_error<InvalidArgument>([&] { reducer.reduced_buckets(); }, {"retain_allreduce_buffers"});
}

/// Half sums that a plain sum would overflow.
// On the CPU, where memory that is free serves every stream.
TEST(Reducer, WhatItReducedStaysWhileAStreamReadsIt) {
  run_threads(2, [](ProcessGroup& group) {
    const core::DefaultDeviceGuard host(Device{});
    Reducer reducer(group, {.allreduce_always_fp32 = true, .retain_allreduce_buffers = true});
    const Tensor a = Tensor::empty({700}, DType::bf16), b = Tensor::empty({300}, DType::bf16);
    reducer.register_gradients({{"a", a}, {"b", b}});
    const Tensor copy = Tensor::zeros({1000});
    std::atomic<bool> go = false;
    const core::Stream reader = core::Stream::create(Device{}, "reader");
    {
      const core::StreamGuard guard(reader);
      kernels::fill(a, group.rank() == 0 ? 1.0 : 3.0);
      kernels::fill(b, 2.0);
      reducer.mark_ready(0);
      reducer.mark_ready(1);
      reducer.wait();
      const TensorView reduced = reducer.reduced_buckets().at(0);
      ASSERT_EQ(reduced.numel(), 1000);
      reader.submit([&go] {
        while (!go) std::this_thread::yield();
      });
      kernels::copy(reduced, copy);
      reducer.mark_ready(0);  // the next pass lets go of what this one reduced
    }
    const Tensor other = Tensor::full({1000}, 7.0);
    go = true;
    reader.synchronize();
    EXPECT_EQ(copy.to_vector(), std::vector<double>(1000, 2.0));
    reducer.mark_ready(1);
    reducer.wait();
    EXPECT_EQ(other.to_vector(), std::vector<double>(1000, 7.0));
  });
}

TEST(Reducer, PredivideKeepsHalfSumsFinite) {
  run_threads(4, [](ProcessGroup& group) {
    const NamedTensors gradients = {{"g", Tensor::full({3}, 40000.0, DType::f16)}};
    Reducer reducer(group, {.gradient_predivide_factor = 4.0});
    reducer.register_gradients(gradients);
    reducer.mark_ready(0);
    reducer.wait();
    EXPECT_EQ(gradients[0].tensor.to_vector<float>(), std::vector<float>(3, 40000.0F));
  });
  run_threads(4, [](ProcessGroup& group) {  // without it, a sum of halves is not finite
    const NamedTensors gradients = {{"g", Tensor::full({3}, 40000.0, DType::f16)}};
    Reducer reducer(group, {.average = false});
    reducer.register_gradients(gradients);
    reducer.mark_ready(0);
    reducer.wait();
    EXPECT_TRUE(std::isinf(gradients[0].tensor.to_vector<float>()[0]));
  });
}

/// The number in a message: the next collective of a group in which two ranks disagree.
std::int64_t collectives_so_far(const ProcessGroup& group) {
  try {
    group.barrier(core::str("end of rank ", group.rank()));
  } catch (const CommunicationError& error) {
    const std::string text = error.what(), word = "collective ";
    return std::stoll(text.substr(text.find(word) + word.size()));
  }
  ADD_FAILURE() << "expected ranks that disagree";
  return 0;
}

TEST(Reducer, MakesOneCollectiveABucketAndOneForTheOrder) {
  const auto count = [](const ReducerOptions& options, int passes) {
    std::int64_t number = 0;
    run_threads(2, [&](ProcessGroup& group) {
      Trainer trainer;
      Reducer reducer(group, options);
      reducer.register_gradients(trainer.names, trainer.views);
      for (int pass = 0; pass < passes; ++pass) {
        for (std::size_t i = 0; i < 5; ++i) reducer.mark_ready(i);
        reducer.wait();
      }
      const std::int64_t here = collectives_so_far(group);
      if (group.rank() == 0) number = here;
    });
    return number;
  };
  const auto per_pass = [&](const ReducerOptions& options) {
    return count(options, 3) - count(options, 2);
  };
  const ReducerOptions each{.first_bucket_bytes = 1, .bucket_bytes = 1};
  EXPECT_EQ(per_pass({}), 3);  // neighbours, the lone f32 one, the lone half one
  EXPECT_EQ(per_pass(each), 5);
  EXPECT_EQ(count({}, 1) - count({}, 0), 3 + 1);
  EXPECT_EQ(per_pass({.delay_allreduce = true}), 3);
  EXPECT_EQ(count({.delay_allreduce = true}, 1) - count({.delay_allreduce = true}, 0), 3);
  EXPECT_EQ(per_pass({.trigger_parameters = {"b"}}), 4);
  EXPECT_EQ(per_pass({.hook = compress_to(DType::f16)}), 3);
}

// ---- Hooks

TEST(Reducer, RunsAUsersHookOnEachBucket) {
  run_threads(2, [](ProcessGroup& group) {
    Trainer trainer;
    std::int64_t bytes = 0, passes = 0;
    std::vector<std::string> names;
    const auto hook = communication_hook([&](const GradientBucket& bucket, const ProcessGroup& g) {
      bytes += static_cast<std::int64_t>(bucket.data.nbytes());
      passes = bucket.pass;
      names.insert(names.end(), bucket.names.begin(), bucket.names.end());
      for (std::size_t i = 0; i < bucket.names.size(); ++i)
        EXPECT_GT(bucket.gradients[i].numel(), 0);
      g.all_reduce(bucket.data, ReduceOp::sum, bucket.name);
      kernels::affine(bucket.data, 10.0 / g.world_size(), 0.0, bucket.data);
    });
    Reducer reducer(group, {.hook = hook});
    reducer.register_gradients(trainer.names, trainer.views);
    for (std::uint64_t pass = 0; pass < 2; ++pass) {
      trainer.write(group.rank(), pass);
      for (std::size_t i = 0; i < 5; ++i) reducer.mark_ready(i);
      reducer.wait();
      trainer.expect(2, pass, 2 / 10.0, 0.5);
    }
    EXPECT_EQ(passes, 1);
    EXPECT_EQ(bytes, 2 * (15 * 4 + 6 * 4 + 7 * 2));
    EXPECT_EQ(names.size(), 10u);
  });
}

TEST(Reducer, AHookThatThrowsBreaksTheGroupForAll) {
  run_threads(2, [](ProcessGroup& group) {
    const NamedTensors gradients = {{"g", Tensor::zeros({3})}};
    const auto hook = communication_hook([](const GradientBucket& bucket, const ProcessGroup& g) {
      if (g.rank() == 1) throw core::Unsupported("[hook] no such thing");
      g.all_reduce(bucket.data, ReduceOp::mean, bucket.name);
    });
    Reducer reducer(group, {.hook = hook});
    reducer.register_gradients(gradients);
    const auto pass = [&] {
      reducer.mark_ready(0);
      reducer.wait();
    };
    if (group.rank() == 1) {
      expect_error<core::Unsupported>(pass, {"no such thing"});
    } else {
      expect_error<CommunicationError>(pass, {"rank 1 gave up", "gradients g", "no such thing"});
    }
  });
}

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

TEST(Hooks, RefuseOptionsOutOfRange) {
  expect_error<InvalidArgument>([] { compress_to(DType::f32); }, {"f16 or bf16", "f32"});
  expect_error<InvalidArgument>([] { communication_hook(nullptr); }, {"expected a function"});
  expect_error<InvalidArgument>([] { power_sgd({.rank = 0}); }, {"rank of at least 1", "0"});
  expect_error<InvalidArgument>([] { power_sgd({.start_step = -1}); }, {"start_step"});
  expect_error<InvalidArgument>([] { power_sgd({.min_compression_rate = -1}); },
                                {"min_compression_rate"});
}

// ---- Mistakes

TEST(Reducer, RefusesOptionsThatMakeNoSense) {
  const auto refuses = [](const ReducerOptions& options, std::initializer_list<std::string> texts) {
    expect_error<InvalidArgument>([&] { Reducer reducer(ProcessGroup::single(), options); }, texts);
  };
  refuses({.bucket_bytes = 0}, {"bucket sizes above 0"});
  refuses({.delay_allreduce = true, .num_allreduce_streams = 2}, {"one stream", "delay_allreduce"});
  refuses({.delay_allreduce = true, .trigger_parameters = {"a"}}, {"trigger_parameters", "'a'"});
  refuses({.num_allreduce_streams = 0}, {"num_allreduce_streams from 1"});
  refuses({.gradient_predivide_factor = 0.0}, {"gradient_predivide_factor", "above 0"});
  refuses({.gradient_predivide_factor = std::numeric_limits<double>::infinity()}, {"finite"});
  refuses({.average = false, .gradient_predivide_factor = 2.0}, {"with average"});
  const auto hook = compress_to(DType::f16);
  refuses({.average = false, .hook = hook}, {"hook to divide by itself"});
  refuses({.gradient_predivide_factor = 2.0, .hook = hook}, {"hook to divide by itself"});
  refuses({.allreduce_always_fp32 = true, .hook = hook}, {"allreduce_always_fp32"});
}

TEST(Reducer, NamesWhatIsWrongWithAList) {
  Reducer reducer(ProcessGroup::single(), {.trigger_parameters = {"z"}});
  const Tensor x = Tensor::zeros({4, 4});
  const auto registers = [&](const std::vector<std::string>& names,
                             const std::vector<TensorView>& views) {
    return [&reducer, names, views] { reducer.register_gradients(names, views); };
  };
  expect_error<InvalidArgument>(registers({"a"}, {x, x}), {"a name for each of 2", "got 1"});
  expect_error<InvalidArgument>(registers({"a"}, {x.view().slice(1, 0, 2)}), {"dense", "'a'"});
  const Tensor whole = Tensor::zeros({2}, DType::i64);
  expect_error<InvalidArgument>(registers({"a"}, {whole}), {"floating", "'a'", "i64"});
  const TensorView nowhere(x.raw_data(), {4}, DType::f32, {DeviceType::cpu, 77});
  expect_error<InvalidArgument>(registers({"a"}, {nowhere}), {"cpu:77"});
  expect_error<InvalidArgument>(registers({"a", "a"}, {x, x}), {"once", "'a' twice"});
  expect_error<InvalidArgument>(registers({"a"}, {x}), {"trigger_parameters", "'z'"});
}

TEST(Reducer, NamesWhereListsDifferOnEveryRank) {
  run_threads(3, [](ProcessGroup& group) {
    const Tensor x = Tensor::zeros({4, group.rank() == 2 ? 5 : 4});
    Reducer reducer(group);
    expect_error<InvalidArgument>(
        [&] {
          reducer.register_gradients(NamedTensors{{"w", x}});
        },
        {"'w' f32[4, 4]", "rank 0", "f32[4, 5]", "rank 2"});
  });
  run_threads(2, [](ProcessGroup& group) {  // wrong by itself, on one rank
    const Tensor x = Tensor::zeros({4}, group.rank() == 1 ? DType::i64 : DType::f32);
    Reducer reducer(group);
    expect_error<InvalidArgument>(
        [&] {
          reducer.register_gradients(NamedTensors{{"w", x}});
        },
        {group.rank() == 1 ? "[reducer] expected" : "got on rank 1: [reducer] expected",
         "floating dtype 'w'", "i64"});
  });
}

/// Every rank gets a typed error that names the gradient.
void check_mistake(const std::function<void(Reducer&)>& mistake, const std::string& text) {
  run_threads(2, [&](ProcessGroup& group) {
    const NamedTensors gradients = {{"first", Tensor::zeros({4})}, {"second", Tensor::zeros({4})}};
    Reducer reducer(group, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    if (group.rank() == 0) {
      reducer.register_gradients(gradients);
      expect_error<InvalidArgument>([&] { mistake(reducer); }, {"[reducer]", text});
      return;
    }
    const auto pass = [&] {  // rank 0 may give up before this one knows that they have registered
      reducer.register_gradients(gradients);
      for (int k = 0; k < 2; ++k) {
        reducer.mark_ready(1);
        reducer.mark_ready(0);
        reducer.wait();
      }
    };
    expect_error<CommunicationError>(pass, {"rank 0 gave up", text});
  });
}

TEST(Reducer, AGradientMarkedTwiceIsAnErrorOnEveryRank) {
  check_mistake(
      [](Reducer& reducer) {
        reducer.mark_ready(1);
        reducer.mark_ready(1);
      },
      "'second' twice");
}
TEST(Reducer, AGradientNeverMarkedIsAnErrorOnEveryRank) {
  check_mistake(
      [](Reducer& reducer) {
        reducer.mark_ready(1);
        reducer.wait();
      },
      "no word of 'first'");
}
TEST(Reducer, APlaceOutOfTheListIsAnErrorOnEveryRank) {
  check_mistake([](Reducer& reducer) { reducer.mark_ready(2); }, "one of 2 gradients, got 2");
}

TEST(Reducer, BeginsAnewAfterAPassIsAbandoned) {
  run_threads(2, [](ProcessGroup& group) {
    const NamedTensors gradients = {{"a", Tensor::zeros({4})}, {"b", Tensor::zeros({4})}};
    Reducer reducer(group, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    reducer.register_gradients(gradients);
    reducer.mark_ready(1);
    expect_error<InvalidArgument>([&] { reducer.register_gradients(gradients); }, {"under way"});
    expect_error<InvalidArgument>([&] { reducer.load_state_dict(reducer.state_dict()); },
                                  {"under way"});
    reducer.abandon();
    for (std::size_t i = 0; i < 2; ++i) {
      kernels::fill(gradients[i].tensor, group.rank() + 1.0);
      reducer.mark_ready(i);
    }
    reducer.wait();
    for (const NamedTensor& x : gradients)
      EXPECT_EQ(x.tensor.to_vector<float>(), std::vector<float>(4, 1.5F));
  });
}

TEST(Reducer, WeightsEachRank) {
  run_threads(3, [](ProcessGroup& group) {
    const NamedTensors gradients = {{"a", Tensor::full({4}, 1.0 + group.rank())}};
    Reducer reducer(group);
    reducer.register_gradients(gradients);
    reducer.set_weights(group.rank() == 0 ? 0.0 : 1.0, 1.5);  // of the last two
    reducer.mark_ready(0);
    reducer.wait();
    EXPECT_EQ(gradients[0].tensor.to_vector<float>(), std::vector<float>(4, 2.5F));
  });
}

// ---- Flat buffers

TEST(Reducer, GradientsOfAnotherLossAreAnErrorThatNamesBoth) {
  run_threads(2, [](ProcessGroup& group) {
    Trainer trainer;
    Reducer reducer(group);
    reducer.register_gradients(trainer.names, trainer.views);
    const auto pass = [&](const std::string& loss) {
      reducer.set_losses(loss);
      for (std::size_t i = trainer.views.size(); i-- > 0;) reducer.mark_ready(i);
      reducer.wait();
    };
    trainer.write(group.rank(), 0);
    pass("loss 0 scaled by 8");
    trainer.expect(2, 0, 2.0, 1e-6);
    expect_error<CommunicationError>([&] { pass(core::str("loss ", group.rank())); },
                                     {"'loss 0: gradients", "'loss 1: gradients"});
  });
}

TEST(Flatten, GoesThereAndBack) {
  const Tensor a = normal({2, 3}, 1), b = normal({4}, 2);
  const Tensor channels_last = Tensor::empty_strided({2, 3}, {1, 2}, DType::f32, Device{});
  kernels::copy(normal({2, 3}, 3), channels_last);
  const Tensor flat = flatten({a, b, channels_last});
  ASSERT_EQ(flat.shape(), Shape({16}));
  auto expected = a.to_vector<float>();
  const auto more = b.to_vector<float>();
  expected.insert(expected.end(), more.begin(), more.end());
  const auto* memory = static_cast<const float*>(channels_last.raw_data());
  expected.insert(expected.end(), memory, memory + 6);  // in the order of its memory
  EXPECT_EQ(flat.to_vector<float>(), expected);

  const Tensor c = Tensor::zeros({2, 3}), d = Tensor::zeros({4}),
               e = Tensor::empty_like(channels_last);
  unflatten(flat, {c, d, e}, 2.0);
  for (std::size_t i = 0; i < 6; ++i)
    EXPECT_EQ(e.to_vector<float>()[i], 2 * channels_last.to_vector<float>()[i]);
  EXPECT_EQ(c.to_vector<float>()[5], 2 * a.to_vector<float>()[5]);

  expect_error<InvalidArgument>([] { flatten(std::vector<TensorView>{}); },
                                {"at least one tensor"});
  const Tensor half = Tensor::zeros({2}, DType::f16);
  expect_error<InvalidArgument>([&] { flatten({a, half}); }, {"one dtype and device", "f16"});
  expect_error<InvalidArgument>([&] { unflatten(flat, {a, b}); }, {"10 elements", "16"});
}

// A trainer's own arrays on two ranks: whose gradient overflowed is known on both, although their
// sum holds the inf.
TEST(Reducer, ItsWorldTellsWhoseGradientsWereNotFinite) {
  run_threads(2, [](ProcessGroup& group) {
    std::vector<float> weights(6, 1.0f), gradients(6, 0.5f);
    const auto wrapped = [&](const std::string& name, std::size_t begin) {
      return optim::wrap_parameter(name, Tensor::wrap(weights, {3}, begin),
                                   Tensor::wrap(gradients, {3}, begin));
    };
    const NamedTensors parameters = {wrapped("a", 0), wrapped("b", 3)};
    Reducer reducer(group);
    reducer.register_gradients({{"a", parameters[0].tensor.gradient_slot().memory()},
                                {"b", parameters[1].tensor.gradient_slot().memory()}});
    optim::FusedAdam optimizer(parameters, {.lr = 0.1});
    amp::ScaledStep scaled(optimizer, {.init_scale = 1024.0}, reducer.world());
    const auto pass = [&](float b) {
      std::fill(gradients.begin(), gradients.end(), 0.5f);
      gradients[4] = b;
      reducer.mark_ready(1);
      reducer.mark_ready(0);
      reducer.wait();
      return scaled.step();
    };
    const optim::StepResult skipped =
        pass(group.rank() == 1 ? std::numeric_limits<float>::infinity() : 0.5f);
    EXPECT_FALSE(skipped.applied);
    EXPECT_EQ(skipped.culprit, "b");
    EXPECT_EQ(skipped.reason,
              "inf in the gradient of b (1 element) on rank 1; loss scale 1024 -> 512");
    EXPECT_EQ(weights, std::vector<float>(6, 1.0f));
    EXPECT_EQ(scaled.last_overflow()->step, 1);
    EXPECT_TRUE(pass(0.5f).applied);
    EXPECT_NEAR(weights[0], 0.9f, 1e-3f);
    EXPECT_EQ(optimizer.steps(), 1);
    EXPECT_EQ(scaled.scale(), 512.0);
    EXPECT_THROW((void)scaled.step({.check = false}), InvalidArgument);
  });
}

TEST(Reducer, AVectorThatHasMovedIsNamedOnEveryRank) {
  run_threads(2, [](ProcessGroup& group) {
    std::vector<float> gradient(3, 1.0f);
    Reducer reducer(group);
    reducer.register_gradients({{"w", Tensor::wrap(gradient, {3})}});
    if (group.rank() == 1) gradient = std::vector<float>(3, 2.0f);
    const auto pass = [&] {
      reducer.mark_ready(0);
      reducer.wait();
    };
    if (group.rank() == 1) {
      expect_error<InvalidArgument>(pass, {"gradient 'w'", "has moved them"});
    } else {
      expect_error<CommunicationError>(pass, {"gradient 'w'", "has moved them"});
    }
  });
}

TEST(Flatten, BroadcastsParametersOfAnyDtype) {
  run_threads(3, [](ProcessGroup& group) {
    const double own = group.rank() + 1;
    const NamedTensors tensors = {{"a", Tensor::full({3}, own)},
                                  {"b", Tensor::full({5}, own, DType::bf16)},
                                  {"c", Tensor::full({2, 2}, own)},
                                  {"n", Tensor::full({1}, own, DType::i64)}};
    std::vector<std::uint64_t> versions;
    for (const auto& [name, tensor] : tensors) versions.push_back(tensor.storage()->version());
    broadcast_parameters(tensors, group, 1);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (const double value : tensors[i].tensor.to_vector()) EXPECT_EQ(value, 2.0);
      EXPECT_GT(tensors[i].tensor.storage()->version(), versions[i]);
    }
  });
}

}  // namespace
}  // namespace cairn::parallel
