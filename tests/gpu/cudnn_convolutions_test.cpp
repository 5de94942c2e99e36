// Cairn's convolutions through the simulated cuDNN: the plans that they take, keep and share, what
// they make of refusals, and views of any alignment.
#include <cudnn.h>
#include <gmock/gmock.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/conv.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/product_choices.h"
#include "cairn/kernels/tf32.h"
#include "cuda/cudnn/conv_plan.h"
#include "gpu/timed_choices.h"
#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

using kernels::cuda::ConvPass;

constexpr Device kGpu{core::DeviceType::cuda, 0}, kOther{core::DeviceType::cuda, 1};

/// One convolution with all that its three passes need, and the CPU's results.
struct Images {
  Tensor x, weight, dy;
  kernels::Conv2dOptions options{.padding = {1, 1}};

  explicit Images(DType dtype = DType::f32, std::int64_t groups = 1, std::int64_t height = 6)
      : x(random_tensor({2, 4, height, 5}, dtype, kGpu, 1)),
        weight(random_tensor({6, 4 / groups, 3, 3}, dtype, kGpu, 2)),
        dy(random_tensor({2, 6, height, 5}, dtype, kGpu, 3)) {
    options.groups = groups;
  }

  /// As it is asked for first.
  kernels::cuda::ConvShape shape(ConvPass pass) const {
    const auto sizes = [](const Tensor& t) {
      const core::Shape& s = t.shape();
      return std::array{s[0], s[1], s[2], s[3]};
    };
    return {.pass = pass,
            .dtype = x.dtype(),
            .x = sizes(x),
            .weight = sizes(weight),
            .y = sizes(dy),
            .stride = {1, 1},
            .padding = {1, 1},
            .dilation = {1, 1}};
  }

  struct Results {
    std::vector<double> y, dx, dweight;
  };
  Results on(Device device) const {
    const auto there = [&](const Tensor& t) {
      return Tensor::from(t.to_vector<double>(), t.shape(), t.dtype(), device);
    };
    return run(there(x), there(weight), there(dy));
  }
  Results run(const Tensor& images, const Tensor& filter, const Tensor& grad) const {
    const Device device = images.device();
    const Tensor y = Tensor::empty(grad.shape(), x.dtype(), device);
    const Tensor dx = Tensor::empty(images.shape(), x.dtype(), device);
    const Tensor dweight = Tensor::empty(filter.shape(), x.dtype(), device);
    kernels::conv2d(images.view(), filter.view(), {}, y.view(), options);
    kernels::conv2d_backward_data(grad.view(), filter.view(), {}, dx.view(), options);
    kernels::conv2d_backward_weight(images.view(), grad.view(), dweight.view(), {}, options, false);
    return {y.to_vector<double>(), dx.to_vector<double>(), dweight.to_vector<double>()};
  }
};

void expect_same(const Images::Results& actual, const Images::Results& expected,
                 double error = 1e-5) {
  expect_close(actual.y, expected.y, error, error, "y");
  expect_close(actual.dx, expected.dx, error, error, "dx");
  expect_close(actual.dweight, expected.dweight, error, error, "dweight");
}

constexpr const char *kRun = "cudnnBackendExecute", *kPropose = "cudnnBackendFinalize(heuristics)",
                     *kBuild = "cudnnBackendFinalize(plan)";

TEST_F(Cudnn, ConvolutionsAgreeWithTheCpus) {
  for (const std::int64_t groups : {1, 2}) {
    const Images images(DType::f32, groups);
    expect_same(images.on(kGpu), images.on({}));
  }
  const Images halves(DType::bf16);
  expect_same(halves.on(kGpu), halves.on({}), 0x1p-6);
}

TEST_F(Cudnn, ConvolutionsComputeF32InTf32WhereItIsAllowed) {
  const Images images(DType::f32);
  const Images::Results exact = images.on({});
  for (const bool allowed : {false, true, false}) {
    kernels::allow_tf32(allowed);
    const Images::Results got = images.on(kGpu);
    double worst = 0.0;
    for (std::size_t i = 0; i < got.y.size(); ++i)
      worst = std::max(worst, std::abs(got.y[i] - exact.y[i]));
    EXPECT_EQ(worst > 5e-5, allowed) << worst;
    expect_same(got, exact, 3e-2);
  }
}

TEST_F(Cudnn, ConvolutionsTakeNothingThatIsNotDeterministicOrRoundsMore) {
  const kernels::cuda::Queue queue("conv2d", kGpu);
  const auto expect_none = [&](const kernels::cuda::ConvShape& shape) {
    const auto plans = kernels::cuda::conv_plans_for(shape);
    std::size_t n = 0;
    for (; const auto plan = plans->at(queue, n); ++n)
      EXPECT_THAT(plan->name(), Not(testing::MatchesRegex("[0126]( .*)?")));
    EXPECT_GE(n, 2u);
  };
  for (const DType dtype : {DType::f32, DType::f16}) {
    const Images images(dtype, 1, 7);
    expect_same(images.on(kGpu), images.on({}), dtype == DType::f32 ? 1e-5 : 0x1p-9);
    for (const ConvPass pass :
         {ConvPass::forward, ConvPass::backward_data, ConvPass::backward_weight}) {
      auto shape = images.shape(pass);
      expect_none(shape);
      shape.tf32 = dtype == DType::f32;
      expect_none(shape);
    }
  }
}

TEST_F(Cudnn, ConvolutionsTakeTheNextPlanWhereOneRefuses) {
  const Images images(DType::f32, 1, 8);
  const auto expected = images.on({});
  const CallCount runs(kRun);
  gpusim::inject(kRun, 1, CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(runs(), 4u);
  gpusim::inject(kBuild, 1, CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING);
  const Images others(DType::f32, 1, 9);
  expect_same(others.on(kGpu), others.on({}));
}

TEST_F(Cudnn, ConvolutionsTakeTheOtherStorageWhereEveryPlanOfOneRefuses) {
  const Images images(DType::f32, 1, 10);
  const auto expected = images.on({});
  const CallCount runs(kRun);
  for (const std::uint64_t k : {1, 2}) gpusim::inject(kRun, k, CUDNN_STATUS_NOT_SUPPORTED);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(runs(), 5u) << "Winograd and plain, and then row-major";
}

TEST_F(Cudnn, ConvolutionsAskFurtherWhereHeuristicsOfferNothing) {
  const auto names = [&](std::int64_t height) {
    const Images images(DType::f16, 1, height);
    expect_same(images.on(kGpu), images.on({}), 0x1p-9);
    const kernels::cuda::Queue queue("conv2d", kGpu);
    return kernels::cuda::conv_plans_for(images.shape(ConvPass::forward))->at(queue, 0)->name();
  };
  EXPECT_EQ(names(11), "3 2=2") << "mode A's";
  gpusim::inject(kPropose, 1, CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(names(12), "3 2=3") << "mode B's";
  for (const std::uint64_t k : {1, 2}) gpusim::inject(kPropose, k, CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(names(13), "5") << "the fallback's";
}

TEST_F(Cudnn, ConvolutionsFailWhereNothingIsProposedOrRuns) {
  const Images images(DType::f32, 1, 14);
  gpusim::inject(kRun, 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  EXPECT_THAT([&] { (void)images.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("to have a deterministic plan")));
  gpusim::clear_injected();
  gpusim::inject(kRun, 1, CUDNN_STATUS_EXECUTION_FAILED);
  EXPECT_THAT([&] { (void)images.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("cudnnBackendExecute to succeed")));
  gpusim::clear_injected();
  expect_same(images.on(kGpu), images.on({}));
  gpusim::inject(kPropose, 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  const Images others(DType::f32, 1, 15);
  EXPECT_THAT([&] { (void)others.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("to have a deterministic plan")));
}

TEST_F(Cudnn, PlansAreMadeOnceForAShapeAndADevice) {
  const Images images(DType::f32, 1, 16);
  const auto expected = images.on({});
  const CallCount proposals(kPropose);
  expect_same(images.on(kGpu), expected);
  EXPECT_GT(proposals(), 0u);
  const auto first = proposals();
  const CallCount again(kPropose), builds(kBuild);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(again() + builds(), 0u);
  expect_same(images.on(kOther), expected);
  EXPECT_EQ(again(), first);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(again(), first);
}

TEST_F(Cudnn, WhatHasNoPlanIsAskedForOnce) {
  const Images grouped(DType::f32, 2, 16);  // row-major alone
  const auto expected = grouped.on({});
  const CallCount proposals(kPropose);
  expect_same(grouped.on(kGpu), expected);
  EXPECT_GT(proposals(), 3u);
  const CallCount again(kPropose);
  expect_same(grouped.on(kGpu), expected);
  EXPECT_EQ(again(), 0u);
}

TEST_F(Cudnn, ThreadsShareThePlansOfAShape) {
  const Images images(DType::f32, 1, 17);
  const auto expected = images.on({});
  std::vector<std::thread> threads;
  for (const Device device : {kGpu, kOther, kGpu, kOther}) {
    threads.emplace_back([&, device] {
      const core::StreamGuard guard(core::Stream::create(device));
      for (int i = 0; i < 4; ++i) expect_same(images.on(device), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Cudnn, ThreadsExecuteAPlanOneAtATime) {
  const auto run = [] {
    const core::StreamGuard guard(core::Stream::create(kGpu));
    const Tensor x = Tensor::full({1, 1, 1, 1}, 3.0, DType::f32, kGpu);
    const Tensor y = Tensor::empty({1, 1, 1, 1}, DType::f32, kGpu);
    const kernels::cuda::Queue queue("conv2d", kGpu);
    const auto plan = kernels::cuda::conv_plans_for({.x = {1, 1, 1, 1},
                                                     .weight = {1, 1, 1, 1},
                                                     .y = {1, 1, 1, 1},
                                                     .stride = {1, 1},
                                                     .dilation = {1, 1}})
                          ->at(queue, 0);
    const auto arguments =
        kernels::cuda::conv_arguments(x.view().data, x.view().data, y.view().data);
    for (int i = 0; i < 8000; ++i) ASSERT_TRUE(plan->run(queue, arguments));
    EXPECT_EQ(y.to_vector<float>(), std::vector<float>{9.0f});
  };
  std::thread other(run);
  run();
  other.join();
}

TEST_F(Cudnn, GraphsOutliveTheCacheOfPlans) {
  const Images images(DType::f32, 1, 18);
  const Tensor y = Tensor::empty({2, 6, 18, 5}, DType::f32, kGpu);
  const core::Stream stream = core::Stream::create(kGpu);
  const core::StreamGuard guard(stream);
  const auto work = [&] {
    kernels::conv2d(images.x.view(), images.weight.view(), {}, y.view(), images.options);
  };
  core::Graph graph(kGpu);
  graph.warm_up(work);
  graph.capture(work);
  const kernels::cuda::Queue queue("conv2d", kGpu);
  for (std::int64_t n = 1; n <= 1100; ++n) {  // other shapes drive the captured one out
    kernels::cuda::ConvShape shape = images.shape(ConvPass::forward);
    shape.x[0] = shape.y[0] = n + 2;
    (void)kernels::cuda::conv_plans_for(shape);
  }
  kernels::fill(y.view(), 0.0);
  graph.replay();
  expect_close(y, images.on({}).y, 1e-5, 1e-5);
}

class ChosenCudnn : public Cudnn {
 protected:
  const test::TimedChoices timed_;
  static std::string with(std::string saved, const std::string& from, const std::string& to) {
    for (auto at = saved.find(from); at != std::string::npos; at = saved.find(from, at + to.size()))
      saved.replace(at, from.size(), to);
    return saved;
  }
};

TEST_F(ChosenCudnn, PlansComeBackWithASavedState) {
  const Images images(DType::f16, 1, 19);
  const auto expected = images.on({});
  expect_same(images.on(kGpu), expected, 0x1p-9);
  const std::string saved = kernels::product_choices();
  EXPECT_THAT(saved, AllOf(HasSubstr("cudnn_convolutions"),
                           HasSubstr("forward f16 channels-last x 2 4 19 5"), HasSubstr("3 2=2")));
  kernels::use_product_choices(with(saved, "3 2=2", "3 2=1"));
  const CallCount proposals(kPropose);
  expect_same(images.on(kGpu), expected, 0x1p-9);
  EXPECT_EQ(proposals(), 0u);
  const kernels::cuda::Queue queue("conv2d", kGpu);
  const auto plans = kernels::cuda::conv_plans_for(images.shape(ConvPass::forward));
  EXPECT_EQ(plans->at(queue, 0)->name(), "3 2=1");
  EXPECT_EQ(plans->at(queue, 1)->name(), "3 2=2") << "behind it, should it refuse";
}

TEST_F(ChosenCudnn, PlansAreKeptInAFile) {
  constexpr const char* kFolder = "CAIRN_TEST_PLANS";  // the processes below share it
  std::string fresh = std::filesystem::temp_directory_path() / "cairn_plans_XXXXXX";
  if (getenv(kFolder) == nullptr) setenv(kFolder, mkdtemp(fresh.data()), 1);
  const std::filesystem::path folder = getenv(kFolder);
  const auto take = [&](const std::string& expected) {
    setenv("CAIRN_CACHE", folder.c_str(), 1);
    const Images images(DType::f16, 1, 40);
    expect_same(images.on(kGpu), images.on({}), 0x1p-9);
    const kernels::cuda::Queue queue("conv2d", kGpu);
    const auto plans = kernels::cuda::conv_plans_for(images.shape(ConvPass::forward));
    std::_Exit(plans->at(queue, 0)->name() == expected && !HasFailure() ? 0 : 1);
  };
  EXPECT_EXIT(take("3 2=2"), testing::ExitedWithCode(0), "");
  const auto file = folder / "cudnn_convolutions.json";
  std::stringstream kept;
  kept << std::ifstream(file).rdbuf();
  EXPECT_THAT(kept.str(), HasSubstr(core::str("cuDNN ", cudnnGetVersion())));
  std::ofstream(file) << with(kept.str(), "3 2=2", "3 2=1");
  EXPECT_EXIT(take("3 2=1"), testing::ExitedWithCode(0), "");
  std::filesystem::remove_all(folder);
  unsetenv(kFolder);
}

TEST_F(ChosenCudnn, APlanThatIsNoneGivesWayToAProposal) {
  std::int64_t height = 20;
  for (const char* foreign :
       {"99", "-1", "3 2=9", "3 40=1", "3 2", "3 x=1", "0", "2", "1", "6", "", "plan"}) {
    const Images images(DType::f16, 1, height++);
    const auto expected = images.on({});
    expect_same(images.on(kGpu), expected, 0x1p-9);
    kernels::use_product_choices(with(kernels::product_choices(), "3 2=2", foreign));
    expect_same(images.on(kGpu), expected, 0x1p-9);
    const kernels::cuda::Queue queue("conv2d", kGpu);
    const auto plans = kernels::cuda::conv_plans_for(images.shape(ConvPass::forward));
    EXPECT_EQ(plans->at(queue, 0)->name(), "3 2=2") << foreign;
    kernels::set_product_routes("time");
  }
}

TEST_F(Cudnn, ConvolutionsTakeSlicesOfAnyAlignment) {
  const Images images;
  for (const bool channels_last : {false, true}) {
    // A part of a longer buffer, 4 bytes past an aligned address.
    const auto slice = [&](const Tensor& t) {
      const Tensor all = Tensor::empty({t.numel() + 1}, t.dtype(), t.device());
      const auto strides = channels_last ? core::channels_last_strides(t.shape())
                                         : core::contiguous_strides(t.shape());
      const TensorView front = all.view().slice(0, 1, t.numel() + 1);
      const Tensor part =
          all.alias(TensorView(front.data, t.shape(), strides, t.dtype(), t.device()));
      kernels::copy(t.view(), part.view());
      return part;
    };
    const auto results = images.run(slice(images.x), slice(images.weight), slice(images.dy));
    expect_same(results, images.on({}));
  }
}

TEST_F(Cudnn, ConvolutionsIntoSlicesOfAnyAlignment) {
  const Images images;
  const Tensor all = Tensor::full({images.dy.numel() + 2}, 7.0, DType::f32, kGpu);
  const Tensor y = all.alias(all.view().slice(0, 1, images.dy.numel() + 1).reshape({2, 6, 6, 5}));
  kernels::conv2d(images.x.view(), images.weight.view(), {}, y.view(), images.options);
  expect_close(y, images.on({}).y, 1e-5, 1e-5);
  EXPECT_EQ(all.to_vector<float>().front(), 7.0f);
  EXPECT_EQ(all.to_vector<float>().back(), 7.0f);
}

TEST_F(Cudnn, ConvolutionsIntoChannelsLastSlicesOfAnyAlignment) {
  const Images images;
  const Tensor all = Tensor::full({images.dy.numel() + 1}, 7.0, DType::f32, kGpu);
  const Shape shape{2, 6, 6, 5};
  const TensorView y(static_cast<float*>(all.raw_data()) + 1, shape,
                     core::channels_last_strides(shape), DType::f32, kGpu);
  kernels::conv2d(images.x.view(), images.weight.view(), {}, y, images.options);
  expect_close(all.alias(y), images.on({}).y, 1e-5, 1e-5);
}

TEST_F(Cudnn, ImagesPastTheLimitAreRefused) {
  const Tensor pixel = Tensor::full({1, 1, 1, 1}, 1.0, DType::f16, kGpu);
  const TensorView x = pixel.view().expand({1, 1, 65536, 32768});
  const Tensor y = Tensor::empty({1, 1, 2, 1}, DType::f16, kGpu);
  const kernels::Conv2dOptions options{.stride = {32768, 32768}};
  EXPECT_THAT([&] { kernels::conv2d(x, pixel.view(), {}, y.view(), options); },
              ThrowsMessage<core::Unsupported>(HasSubstr("at most 2147483647 elements")));
}

TEST_F(Cudnn, LargeBatchesAreComputedInParts) {
  using kernels::cuda::images_at_once;
  EXPECT_EQ(images_at_once("conv2d", {512, 64, 256, 256}, {1, 64, 1, 1}, {512, 1, 256, 256}), 511);
  EXPECT_EQ(images_at_once("conv2d", {512, 1, 256, 256}, {64, 1, 1, 1}, {512, 64, 256, 256}), 511);
  EXPECT_GE(images_at_once("conv2d", {8, 3, 32, 32}, {4, 3, 3, 3}, {8, 4, 30, 30}), 8);
}

}  // namespace
}  // namespace cairn::test
