// The simulated cuDNN: right convolutions, planted breaches of its contract, and what Cairn's calls
// make of refusals.
#include <cudnn.h>
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/kernels/conv.h"
#include "cairn/kernels/tf32.h"
#include "cuda/cudnn/conv_plan.h"
#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using gpusim::Element;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Sizes = std::array<int, 4>;

#define OK(call) ASSERT_EQ(call, CUDNN_STATUS_SUCCESS)

int count_of(const Sizes& s) {
  return s[0] * s[1] * s[2] * s[3];
}

enum class Pass { forward, backward_data, backward_filter };

struct Convolution {
  Pass pass = Pass::forward;
  Element element = Element::f32;
  cudnnTensorFormat_t format = CUDNN_TENSOR_NCHW;
  Sizes x{2, 4, 6, 5}, w{6, 4, 3, 3}, y{2, 6, 6, 5};
  int padding = 1, stride = 1, dilation = 1, groups = 1;
  cudnnMathType_t math = CUDNN_FMA_MATH;
  float alpha = 1.0f, beta = 0.0f;
  int algorithm = 1;  // with workspace, in every pass

  std::size_t place(const Sizes& s, int n, int c, int h, int w) const {
    const bool last = format == CUDNN_TENSOR_NHWC;
    return static_cast<std::size_t>(last ? ((n * s[2] + h) * s[3] + w) * s[1] + c
                                         : ((n * s[1] + c) * s[2] + h) * s[3] + w);
  }
};

/// The descriptors and memory of a convolution.
struct Prepared {
  Convolution c;
  std::vector<double> x_values, w_values, y_values;
  DeviceValues x, w, y, workspace;
  cudnnHandle_t handle = nullptr;
  cudnnTensorDescriptor_t x_as = nullptr, y_as = nullptr;
  cudnnFilterDescriptor_t w_as = nullptr;
  cudnnConvolutionDescriptor_t how = nullptr;

  explicit Prepared(const Convolution& convolution)
      : c(convolution),
        x_values(random(c.x, 1)),
        w_values(random(c.w, 2)),
        y_values(random(c.y, 3)),
        x(c.element, x_values),
        w(c.element, w_values),
        y(c.element, y_values),
        workspace(Element::f32, 1 << 16) {
    EXPECT_EQ(cudnnCreate(&handle), 0);
    EXPECT_EQ(cudnnCreateTensorDescriptor(&x_as), 0);
    EXPECT_EQ(cudnnCreateTensorDescriptor(&y_as), 0);
    EXPECT_EQ(cudnnCreateFilterDescriptor(&w_as), 0);
    EXPECT_EQ(cudnnCreateConvolutionDescriptor(&how), 0);
    EXPECT_EQ(cudnnSetTensor4dDescriptor(x_as, c.format, type(), c.x[0], c.x[1], c.x[2], c.x[3]),
              0);
    EXPECT_EQ(cudnnSetTensor4dDescriptor(y_as, c.format, type(), c.y[0], c.y[1], c.y[2], c.y[3]),
              0);
    EXPECT_EQ(cudnnSetFilter4dDescriptor(w_as, type(), c.format, c.w[0], c.w[1], c.w[2], c.w[3]),
              0);
    EXPECT_EQ(
        cudnnSetConvolution2dDescriptor(how, c.padding, c.padding, c.stride, c.stride, c.dilation,
                                        c.dilation, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
        0);
    EXPECT_EQ(cudnnSetConvolutionGroupCount(how, c.groups), 0);
    EXPECT_EQ(cudnnSetConvolutionMathType(how, c.math), 0);
  }

  std::vector<double> random(const Sizes& sizes, std::uint64_t seed) const {
    return rounded(c.element, random_values(count_of(sizes), seed));
  }
  cudnnDataType_t type() const {
    if (c.element == Element::f32) return CUDNN_DATA_FLOAT;
    return c.element == Element::f16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
  }

  std::size_t needed() const {
    std::size_t bytes = 0;
    EXPECT_EQ(ask(&bytes), 0);
    return bytes;
  }
  cudnnStatus_t ask(std::size_t* bytes) const {
    if (c.pass == Pass::forward) {
      return cudnnGetConvolutionForwardWorkspaceSize(
          handle, x_as, w_as, how, y_as, static_cast<cudnnConvolutionFwdAlgo_t>(c.algorithm),
          bytes);
    }
    if (c.pass == Pass::backward_data) {
      return cudnnGetConvolutionBackwardDataWorkspaceSize(
          handle, w_as, y_as, how, x_as, static_cast<cudnnConvolutionBwdDataAlgo_t>(c.algorithm),
          bytes);
    }
    return cudnnGetConvolutionBackwardFilterWorkspaceSize(
        handle, x_as, y_as, how, w_as, static_cast<cudnnConvolutionBwdFilterAlgo_t>(c.algorithm),
        bytes);
  }

  cudnnStatus_t run() const { return run_with(x.data(), workspace.data(), needed()); }
  cudnnStatus_t run_with(void* x_data, void* space, std::size_t bytes) const {
    if (c.pass == Pass::forward) {
      return cudnnConvolutionForward(handle, &c.alpha, x_as, x_data, w_as, w.data(), how,
                                     static_cast<cudnnConvolutionFwdAlgo_t>(c.algorithm), space,
                                     bytes, &c.beta, y_as, y.data());
    }
    if (c.pass == Pass::backward_data) {
      return cudnnConvolutionBackwardData(handle, &c.alpha, w_as, w.data(), y_as, y.data(), how,
                                          static_cast<cudnnConvolutionBwdDataAlgo_t>(c.algorithm),
                                          space, bytes, &c.beta, x_as, x_data);
    }
    return cudnnConvolutionBackwardFilter(handle, &c.alpha, x_as, x_data, y_as, y.data(), how,
                                          static_cast<cudnnConvolutionBwdFilterAlgo_t>(c.algorithm),
                                          space, bytes, &c.beta, w_as, w.data());
  }

  /// The sums of the pass over every term, in any order that comes.
  std::vector<double> expected() const {
    std::vector<double> sums(result_values().size(), 0.0);
    const int out = c.y[1] / c.groups;
    const auto term = [&](int n, int o, int h, int w, int i, int r, int s) {
      const int row = h * c.stride - c.padding + r * c.dilation;
      const int column = w * c.stride - c.padding + s * c.dilation;
      if (row < 0 || row >= c.x[2] || column < 0 || column >= c.x[3]) return;
      const std::size_t in_y = c.place(c.y, n, o, h, w), in_w = c.place(c.w, o, i, r, s),
                        in_x = c.place(c.x, n, o / out * c.w[1] + i, row, column);
      if (c.pass == Pass::forward) sums[in_y] += x_values[in_x] * w_values[in_w];
      if (c.pass == Pass::backward_data) sums[in_x] += y_values[in_y] * w_values[in_w];
      if (c.pass == Pass::backward_filter) sums[in_w] += x_values[in_x] * y_values[in_y];
    };
    const int kernel = c.w[1] * c.w[2] * c.w[3];
    for (int k = 0; k < count_of(c.y) * kernel; ++k) {
      const int tap = k % kernel, image = k / kernel;
      term(image / (c.y[1] * c.y[2] * c.y[3]), image / (c.y[2] * c.y[3]) % c.y[1],
           image / c.y[3] % c.y[2], image % c.y[3], tap / (c.w[2] * c.w[3]), tap / c.w[3] % c.w[2],
           tap % c.w[3]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] *= double{c.alpha};
      if (c.beta != 0.0f) sums[i] += double{c.beta} * result_values()[i];
    }
    return rounded(c.element, sums);
  }
  const std::vector<double>& result_values() const {
    if (c.pass == Pass::forward) return y_values;
    return c.pass == Pass::backward_data ? x_values : w_values;
  }
  std::vector<double> result() const {
    if (c.pass == Pass::forward) return y.values();
    return c.pass == Pass::backward_data ? x.values() : w.values();
  }
  void expect_right(const std::string& what = "") const {
    expect_close(result(), expected(), 2e-7, 1e-12, what);
  }
};

class Cudnn : public testing::Test {
 protected:
  Cudnn() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    must(cudaSetDevice(0));
  }
  ~Cudnn() override { gpusim::clear_injected(); }
};
using CudnnDeathTest = Cudnn;

constexpr Pass kPasses[] = {Pass::forward, Pass::backward_data, Pass::backward_filter};

TEST_F(Cudnn, ComputesEveryPass) {
  const Convolution strided{.y = {2, 6, 3, 2}, .padding = 1, .stride = 2, .dilation = 1};
  const Convolution dilated{.x = {1, 4, 9, 8}, .y = {1, 6, 7, 6}, .padding = 1, .dilation = 2};
  const Convolution grouped{.w = {6, 2, 3, 3}, .groups = 2};
  for (Convolution c : {Convolution(), strided, dilated, grouped}) {
    if (c.stride == 2) c.y = {2, 6, 3, 3};
    for (const Pass pass : kPasses) {
      for (const auto format : {CUDNN_TENSOR_NCHW, CUDNN_TENSOR_NHWC}) {
        for (const Element element : {Element::f16, Element::bf16, Element::f32}) {
          if (element == Element::f32 && c.groups > 1 && format == CUDNN_TENSOR_NHWC) continue;
          c.pass = pass, c.format = format, c.element = element;
          const Prepared prepared(c);
          OK(prepared.run());
          prepared.expect_right(std::to_string(static_cast<int>(pass)));
        }
      }
    }
  }
}

TEST_F(Cudnn, ScalesAndAddsUnlessBetaIsZero) {
  for (const Pass pass : kPasses) {
    const Prepared prepared({.pass = pass, .alpha = 0.5f, .beta = 2.0f});
    OK(prepared.run());
    prepared.expect_right();
  }
  const Prepared plain(Convolution{});
  const DeviceValues fresh(Element::f32, plain.y_values.size());  // poison
  OK(cudnnConvolutionForward(plain.handle, &plain.c.alpha, plain.x_as, plain.x.data(), plain.w_as,
                             plain.w.data(), plain.how, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM,
                             nullptr, 0, &plain.c.beta, plain.y_as, fresh.data()));
  expect_close(fresh.values(), plain.expected(), 2e-7, 1e-12);
}

TEST_F(Cudnn, DefaultMathComputesF32InTf32) {
  const Prepared prepared({.math = CUDNN_DEFAULT_MATH});
  OK(prepared.run());
  double worst = 0.0;
  const auto actual = prepared.result(), expected = prepared.expected();
  for (std::size_t i = 0; i < actual.size(); ++i)
    worst = std::max(worst, std::abs(actual[i] - expected[i]));
  EXPECT_GT(worst, 1e-5);
  EXPECT_LT(worst, 1e-2);
}

TEST_F(Cudnn, ListsAlgorithmsThatMustNotBeTakenFirst) {
  const Prepared prepared({.pass = Pass::backward_filter, .stride = 1});
  cudnnConvolutionBwdFilterAlgoPerf_t found[8];
  int count = 0;
  OK(cudnnGetConvolutionBackwardFilterAlgorithm_v7(prepared.handle, prepared.x_as, prepared.y_as,
                                                   prepared.how, prepared.w_as, 8, &count, found));
  ASSERT_EQ(count, 4);
  EXPECT_EQ(found[0].determinism, CUDNN_NON_DETERMINISTIC);
  EXPECT_EQ(found[3].determinism, CUDNN_DETERMINISTIC);
  EXPECT_GT(found[3].memory, 0u);
}

TEST_F(Cudnn, WorkspaceDependsOnTheMathType) {
  const Prepared plain({.math = CUDNN_FMA_MATH}), tensor({.math = CUDNN_DEFAULT_MATH});
  EXPECT_GT(tensor.needed(), plain.needed());
  EXPECT_EQ(tensor.run_with(tensor.x.data(), tensor.workspace.data(), plain.needed()),
            CUDNN_STATUS_BAD_PARAM);
}

TEST_F(Cudnn, AnswersWhatDoesNotFit) {
  Convolution c;
  c.y = {2, 6, 5, 5};
  std::size_t bytes = 0;
  EXPECT_EQ(Prepared(c).ask(&bytes), CUDNN_STATUS_BAD_PARAM) << "the output's height is 6";
  const Prepared prepared(Convolution{});
  OK(cudnnSetFilter4dDescriptor(prepared.w_as, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NHWC, 6, 4, 3, 3));
  EXPECT_EQ(prepared.ask(&bytes), CUDNN_STATUS_NOT_SUPPORTED) << "two storage orders";
  OK(cudnnSetFilter4dDescriptor(prepared.w_as, CUDNN_DATA_HALF, CUDNN_TENSOR_NCHW, 6, 4, 3, 3));
  EXPECT_EQ(prepared.ask(&bytes), CUDNN_STATUS_NOT_SUPPORTED) << "two types";
}

TEST_F(Cudnn, AnswersTensorsThatAreTooLarge) {
  cudnnTensorDescriptor_t tensor = nullptr;
  OK(cudnnCreateTensorDescriptor(&tensor));
  const auto describe = [&](int n, int c, int h) {
    return cudnnSetTensor4dDescriptor(tensor, CUDNN_TENSOR_NHWC, CUDNN_DATA_HALF, n, c, h, 1);
  };
  EXPECT_EQ(describe(1, 32768, 65536), CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(describe(2, 32768, 65536), CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(describe(1, 32767, 65536), CUDNN_STATUS_SUCCESS);
  EXPECT_EQ(describe(1, 0, 4), CUDNN_STATUS_BAD_PARAM);
}

TEST_F(CudnnDeathTest, MisalignedImage) {
  const Prepared prepared(Convolution{});
  EXPECT_DEATH(prepared.run_with(static_cast<char*>(prepared.x.data()) + 4,
                                 prepared.workspace.data(), prepared.needed()),
               "gpusim: cudnn contract: .*aligned to 16 bytes, got one aligned to 4");
}

TEST_F(CudnnDeathTest, HandleOfAnotherThread) {
  const Prepared prepared(Convolution{});
  EXPECT_DEATH(std::thread([&] { (void)prepared.run(); }).join(),
               "gpusim: cudnn contract: .*thread that set the handle's stream");
}

TEST_F(CudnnDeathTest, HandleInTwoThreadsAtOnce) {
  const Prepared prepared(Convolution{});
  const auto use = [&] {
    for (int i = 0; i < 100000; ++i) cudnnSetStream(prepared.handle, nullptr);
  };
  EXPECT_DEATH(
      {
        std::thread other(use);
        use();
        other.join();
      },
      "gpusim: cudnn contract: .*serves one thread at a time");
}

TEST_F(CudnnDeathTest, HandleOfAnotherDevice) {
  const Prepared prepared(Convolution{});
  must(cudaSetDevice(1));
  EXPECT_DEATH((void)prepared.run(), "gpusim: cudnn contract: .*handle of the current device 1");
  cudaStream_t theirs = nullptr;
  must(cudaStreamCreateWithFlags(&theirs, cudaStreamNonBlocking));
  must(cudaSetDevice(0));
  EXPECT_DEATH(cudnnSetStream(prepared.handle, theirs),
               "gpusim: cudnn contract: .*stream of it, got a handle of 0 and a stream of 1");
}

TEST_F(CudnnDeathTest, WorkspacePastItsAllocation) {
  const Prepared prepared(Convolution{});
  const DeviceValues little(Element::f32, 16);
  EXPECT_DEATH((void)prepared.run_with(prepared.x.data(), little.data(), prepared.needed()),
               "gpusim: cudnn contract: .*workspace of [0-9]+ bytes as told, got 64");
}

TEST_F(CudnnDeathTest, UseAfterDestroy) {
  const Prepared prepared(Convolution{});
  OK(cudnnDestroyFilterDescriptor(prepared.w_as));
  EXPECT_DEATH((void)prepared.needed(), "gpusim: use after destroy: .*filter descriptor");
  OK(cudnnDestroy(prepared.handle));
  EXPECT_DEATH((void)prepared.needed(), "gpusim: use after destroy: .*cudnn handle");
}

// Cairn's calls.

constexpr Device kGpu{core::DeviceType::cuda, 0};

/// One convolution with all that its three passes need, and the CPU's results.
struct Images {
  Tensor x, weight, dy;
  kernels::Conv2dOptions options{.padding = {1, 1}};

  explicit Images(DType dtype = DType::f32, std::int64_t groups = 1)
      : x(random_tensor({2, 4, 6, 5}, dtype, kGpu, 1)),
        weight(random_tensor({6, 4 / groups, 3, 3}, dtype, kGpu, 2)),
        dy(random_tensor({2, 6, 6, 5}, dtype, kGpu, 3)) {
    options.groups = groups;
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

constexpr const char* kCalls[] = {"cudnnConvolutionForward", "cudnnConvolutionBackwardData",
                                  "cudnnConvolutionBackwardFilter"};

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

TEST_F(Cudnn, ConvolutionsTakeTheNextAlgorithmWhereOneRefuses) {
  const Images images;
  const auto expected = images.on({});
  const CallCount calls(kCalls[0]);
  for (const char* call : kCalls) gpusim::inject(call, 1, CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(calls(), 2u);
}

TEST_F(Cudnn, ConvolutionsTakeTheOtherStorageWhereEveryAlgorithmOfOneRefuses) {
  const Images images;
  const auto expected = images.on({});
  (void)images.on(kGpu);  // plans are made
  const int most[] = {3, 2, 2};
  for (std::size_t pass = 0; pass < 3; ++pass) {
    for (int k = 1; k <= most[pass]; ++k)
      gpusim::inject(kCalls[pass], static_cast<std::uint64_t>(k), CUDNN_STATUS_NOT_SUPPORTED);
  }
  const CallCount calls(kCalls[0]);
  expect_same(images.on(kGpu), expected);
  EXPECT_EQ(calls(), 4u);
}

TEST_F(Cudnn, ConvolutionsFailWhereEveryAlgorithmRefuses) {
  const Images images;
  gpusim::inject(kCalls[0], 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  EXPECT_THAT([&] { (void)images.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("to have a deterministic algorithm")));
  gpusim::clear_injected();
  gpusim::inject(kCalls[0], 1, CUDNN_STATUS_EXECUTION_FAILED);
  EXPECT_THAT([&] { (void)images.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("cudnnConvolutionForward to succeed")));
  gpusim::clear_injected();
  expect_same(images.on(kGpu), images.on({}));
}

TEST_F(Cudnn, ConvolutionsTakeSlicesOfAnyAlignment) {
  const Images images;
  // The last of three parts of a longer buffer, 4 bytes past an aligned address.
  const auto slice = [](const Tensor& t) {
    const std::int64_t count = t.numel();
    const Tensor all = Tensor::empty({count + 1}, t.dtype(), t.device());
    const Tensor part = all.alias(all.view().slice(0, 1, count + 1).reshape(t.shape()));
    const auto values = t.to_vector<float>();
    must(cudaMemcpy(part.view().data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    return part;
  };
  const auto results = images.run(slice(images.x), slice(images.weight), slice(images.dy));
  expect_same(results, images.on({}));
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
