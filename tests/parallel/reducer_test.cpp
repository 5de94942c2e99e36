// The reducer alone: buckets, options, hooks. The oracle is a mean that is computed here.
#include "cairn/parallel/reducer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "cairn/amp/scaled_step.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/adam.h"
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

/// Half sums that a plain sum would overflow.

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

}  // namespace
}  // namespace cairn::parallel
