// What a reducer refuses: options, lists and orders of calls, on the rank at fault and on the rest.
#include <functional>
#include <limits>

#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/reducer.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::expect_error;
using test::run_threads;

TEST(Hooks, RefuseOptionsOutOfRange) {
  expect_error<InvalidArgument>([] { compress_to(DType::f32); }, {"f16 or bf16", "f32"});
  expect_error<InvalidArgument>([] { communication_hook(nullptr); }, {"expected a function"});
  expect_error<InvalidArgument>([] { power_sgd({.rank = 0}); }, {"rank of at least 1", "0"});
  expect_error<InvalidArgument>([] { power_sgd({.start_step = -1}); }, {"start_step"});
  expect_error<InvalidArgument>([] { power_sgd({.min_compression_rate = -1}); },
                                {"min_compression_rate"});
}

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

}  // namespace
}  // namespace cairn::parallel
