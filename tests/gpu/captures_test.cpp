// What a capture of streams takes, and what it refuses.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/tensor.h"
#include "cuda/cudnn/handle.h"
#include "gpu/planted_kernels.h"
#include "gpu/programs.h"
#include "gpu/sim/simulator.h"

namespace cairn::test {
namespace {

using Captures = Simulator;
using CapturesDeathTest = Simulator;
INSTANTIATE_TEST_SUITE_P(Schedules, Captures, testing::ValuesIn(kSchedules), schedule_name);
INSTANTIATE_TEST_SUITE_P(Schedules, CapturesDeathTest, testing::ValuesIn(kSchedules),
                         schedule_name);

void begin(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
  MUST(cudaStreamBeginCapture(stream, mode));
}

/// How the capture ends.
cudaError_t end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  const cudaError_t code = cudaStreamEndCapture(stream, &graph);
  EXPECT_EQ(graph == nullptr, code != cudaSuccess);
  if (graph != nullptr) MUST(cudaGraphDestroy(graph));
  (void)cudaGetLastError();
  return code;
}

cudaGraphExec_t finished(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  MUST(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  MUST(cudaGraphInstantiate(&executable, graph, 0));
  MUST(cudaGraphDestroy(graph));
  return executable;
}

/// What waits for the other stream's work so far.
void follow(cudaStream_t later, cudaStream_t earlier) {
  MUST(cudaStreamWaitEvent(later, recorded(earlier), 0));
}

TEST_P(Captures, ReplayWhatWasCaptured) {
  const cudaStream_t stream = new_stream();
  float *const x = device_floats(), *const y = device_floats();
  launch_fill(stream, x, kCount, 1.0f);
  launch_fill(stream, y, kCount, 0.0f);
  begin(stream);
  launch_add(stream, x, y, kCount);
  const cudaGraphExec_t graph = finished(stream);
  for (int i = 0; i < 3; ++i) OK(cudaGraphLaunch(graph, stream));
  EXPECT_EQ(values_of(y, stream), std::vector<float>(kCount, 3.0f));
  OK(cudaGraphExecDestroy(graph));
}

// y = x + x beside z = x, then z += y.
TEST_P(Captures, BranchesRunInTheirOrder) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  float *const x = device_floats(), *const y = device_floats(), *const z = device_floats();
  launch_fill(stream, x, kCount, 2.0f);
  begin(stream);
  follow(other, stream);
  launch_fill(stream, y, kCount, 1.0f);
  launch_add(stream, x, y, kCount);
  launch_fill(other, z, kCount, 0.0f);
  launch_add(other, x, z, kCount);
  follow(stream, other);
  launch_add(stream, y, z, kCount);
  const cudaGraphExec_t graph = finished(stream);
  for (int i = 0; i < 2; ++i) OK(cudaGraphLaunch(graph, stream));
  EXPECT_EQ(values_of(z, stream), std::vector<float>(kCount, 5.0f));
  launch_fill(other, x, kCount, 0.0f);  // the stream is captured no more, nor ordered by the graph
  OK(cudaStreamSynchronize(other));
}

TEST_P(CapturesDeathTest, BranchesThatNothingOrdersRace) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  float* const x = device_floats();
  begin(stream);
  follow(other, stream);
  launch_fill(stream, x, kCount, 1.0f);
  launch_fill(other, x, kCount, 2.0f);
  follow(stream, other);
  const cudaGraphExec_t graph = finished(stream);
  EXPECT_DEATH(
      {
        cudaGraphLaunch(graph, stream);
        cudaStreamSynchronize(stream);
      },
      "gpusim: race: 'kernel' writes what 'kernel' wrote");
}

TEST_P(Captures, EventsFromOutsideAreRefused) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  for (const cudaStream_t earlier : {other, stream}) {
    const cudaEvent_t event = recorded(earlier);
    begin(stream);
    EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
    EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  }
}

TEST_P(Captures, AForkThatIsNotJoinedIsRefused) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  float* const x = device_floats();
  begin(stream);
  follow(other, stream);
  EXPECT_EQ(end(stream), cudaErrorStreamCaptureUnjoined);
  begin(stream);
  follow(other, stream);
  follow(stream, other);
  launch_fill(other, x, kCount, 1.0f);  // behind the point that is joined
  EXPECT_EQ(end(stream), cudaErrorStreamCaptureUnjoined);
  begin(stream);
  follow(other, stream);
  launch_fill(other, x, kCount, 1.0f);
  follow(stream, other);
  EXPECT_EQ(end(stream), cudaSuccess);
}

TEST_P(Captures, AnEventOfACaptureIsNotAskedFor) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  const std::function<cudaError_t(cudaEvent_t)> questions[] = {
      [](cudaEvent_t event) { return cudaEventQuery(event); },
      [](cudaEvent_t event) { return cudaEventSynchronize(event); }};
  for (const auto& ask : questions) {
    begin(stream, cudaStreamCaptureModeRelaxed);
    const cudaEvent_t event = recorded(stream);
    EXPECT_EQ(ask(event), cudaErrorCapturedEvent);
    EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
    begin(stream);
    OK(cudaEventRecord(event, stream));
    EXPECT_EQ(end(stream), cudaSuccess);
    EXPECT_EQ(ask(event), cudaErrorCapturedEvent);  // nor later
    EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaErrorCapturedEvent);
    OK(cudaEventRecord(event, stream));  // until it is recorded anew
    OK(cudaEventSynchronize(event));
  }
  (void)cudaGetLastError();
}

TEST_P(Captures, AWaitForACapturedStreamBreaksIt) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  for (const cudaStream_t waited : {stream, other}) {
    for (const auto& ask : {cudaStreamSynchronize, cudaStreamQuery, cudaStreamDestroy}) {
      begin(stream, cudaStreamCaptureModeRelaxed);
      follow(other, stream);
      EXPECT_EQ(ask(waited), cudaErrorStreamCaptureUnsupported);
      EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
    }
  }
  begin(stream, cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
}

TEST_P(Captures, ABrokenOneTakesNothingMore) {
  const cudaStream_t stream = new_stream();
  float* const x = device_floats();
  begin(stream);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  (void)cudaGetLastError();
  launch_fill(stream, x, kCount, 1.0f);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaMemsetAsync(x, 0, kBytes, stream), cudaErrorStreamCaptureInvalidated);
  cudaStreamCaptureStatus status{};
  OK(cudaStreamIsCapturing(stream, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
  EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  launch_fill(stream, x, kCount, 1.0f);
  EXPECT_EQ(values_of(x, stream), std::vector<float>(kCount, 1.0f));
}

/// What may wait for a device, or takes memory of one: unsafe, in the words of the manual. Whether
/// each was refused.
std::vector<std::pair<std::string, std::function<bool()>>> unsafe_calls() {
  const auto refused = [](cudaError_t code) { return code == cudaErrorStreamCaptureUnsupported; };
  static const cudaStream_t other = new_stream();
  static const cudaEvent_t outside = recorded(other);
  static void* const pinned = [] {
    void* data = nullptr;
    MUST(cudaHostAlloc(&data, 4, 0));
    *static_cast<float*>(data) = 1.0f;
    return data;
  }();
  const auto freed = [refused](auto allocate, auto free) {
    void* data = nullptr;
    MUST(allocate(&data));
    return [refused, data, free] { return refused(free(data)); };
  };
  const auto on_device = [](void** data) { return cudaMalloc(data, 4); };
  const auto on_host = [](void** data) { return cudaHostAlloc(data, 4, 0); };
  static void* data = nullptr;
  static float value = 0.0f;
  static cublasLtHandle_t products = nullptr;
  static cudnnHandle_t convolutions = nullptr;
  return {
      {"cudaMalloc", [=] { return refused(on_device(&data)); }},
      {"cudaHostAlloc", [=] { return refused(on_host(&data)); }},
      {"cudaFree", freed(on_device, [](void* block) { return cudaFree(block); })},
      {"cudaFreeHost", freed(on_host, [](void* block) { return cudaFreeHost(block); })},
      {"cudaMemcpy", [=] { return refused(cudaMemcpy(&value, pinned, 4, cudaMemcpyHostToHost)); }},
      {"cudaEventQuery", [=] { return refused(cudaEventQuery(outside)); }},
      {"cudaEventSynchronize", [=] { return refused(cudaEventSynchronize(outside)); }},
      {"cudaStreamQuery", [=] { return refused(cudaStreamQuery(other)); }},
      {"cudaStreamSynchronize", [=] { return refused(cudaStreamSynchronize(other)); }},
      {"cublasLtCreate", [] { return cublasLtCreate(&products) == CUBLAS_STATUS_ALLOC_FAILED; }},
      {"cudnnCreate", [] { return cudnnCreate(&convolutions) != CUDNN_STATUS_SUCCESS; }}};
}

/// What takes its place in streams that are not captured, or asks for what no device has to tell.
void expect_safe_calls(float* x) {
  const cudaStream_t other = new_stream();
  const cudaEvent_t event = recorded(other);
  cudaStreamCaptureStatus status{};
  cudaPointerAttributes attributes{};
  std::size_t free = 0, total = 0;
  launch_fill(other, x, kCount, 1.0f);
  for (const cudaError_t code :
       {cudaGetLastError(), cudaMemsetAsync(x, 0, kBytes, other),
        cudaMemcpyAsync(x, x + 32, 4, cudaMemcpyDeviceToDevice, other),
        cudaStreamWaitEvent(other, event, 0), cudaStreamIsCapturing(other, &status),
        cudaPointerGetAttributes(&attributes, x), cudaMemGetInfo(&free, &total),
        cudaEventDestroy(event)})
    EXPECT_EQ(code, cudaSuccess);
}

/// Whether unsafe calls are refused to the thread that captures, and to others; each breaks a
/// capture of its own.
void expect_of(cudaStreamCaptureMode mode, bool own_refused, bool others_refused) {
  const cudaStream_t stream = new_stream();
  float* const x = device_floats();
  for (const bool own : {true, false}) {
    const auto in_thread = [own](const std::function<void()>& f) {
      own ? f() : std::thread(f).join();
    };
    const bool refused = own ? own_refused : others_refused;
    for (const auto& [name, is_refused] : unsafe_calls()) {
      begin(stream, mode);
      in_thread([&, &refuses = is_refused, &call = name] {
        EXPECT_EQ(refuses(), refused) << call << " own " << own;
      });
      EXPECT_EQ(end(stream), refused ? cudaErrorStreamCaptureInvalidated : cudaSuccess) << name;
    }
    begin(stream, mode);
    in_thread([&] { expect_safe_calls(x); });
    EXPECT_EQ(end(stream), cudaSuccess);
    OK(cudaDeviceSynchronize());
    begin(stream, mode);  // no mode lets anybody wait for a captured stream
    in_thread([] { EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported); });
    EXPECT_EQ(end(stream), cudaErrorStreamCaptureInvalidated);
  }
}

TEST_P(Captures, InModeGlobalKeepEveryThreadFromUnsafeCalls) {
  expect_of(cudaStreamCaptureModeGlobal, true, true);
}

TEST_P(Captures, InModeThreadLocalKeepTheirOwnThreadFromUnsafeCalls) {
  expect_of(cudaStreamCaptureModeThreadLocal, true, false);
}

TEST_P(Captures, InModeRelaxedKeepNobodyFromUnsafeCalls) {
  expect_of(cudaStreamCaptureModeRelaxed, false, false);
  const cudaStream_t stream = new_stream();
  begin(stream, cudaStreamCaptureModeRelaxed);
  cudaError_t elsewhere = cudaErrorUnknown;
  std::thread([&] { elsewhere = end(stream); }).join();  // nor from ending them
  EXPECT_EQ(elsewhere, cudaSuccess);
}

// Cairn's own are of mode ThreadLocal: the calling thread's mistakes are found out, and loaders of
// data, other ranks and watchdogs go on.
TEST_P(Captures, OfCairnsLetOtherThreadsCallWhatTheyLike) {
  const core::Device device{core::DeviceType::cuda, 0};
  const core::Tensor x = core::Tensor::full({kCount}, 1.0, core::DType::f32, device);
  const core::Tensor y = core::Tensor::zeros({kCount}, core::DType::f32, device);
  core::Graph graph(device);
  for (const auto& [name, is_refused] : unsafe_calls()) {
    graph.capture([&, &refuses = is_refused] {
      std::thread([&] { EXPECT_FALSE(refuses()); }).join();
      core::copy_bytes(x, y);
    });
    EXPECT_TRUE(graph.captured()) << name;
  }
  for (const auto& [name, is_refused] : unsafe_calls()) {
    const auto capture = [&, &refuses = is_refused] {
      graph.capture([&] { EXPECT_TRUE(refuses()); });
    };
    EXPECT_THROW(capture(), core::DeviceError) << name;
    EXPECT_FALSE(graph.captured()) << name;
    (void)cudaGetLastError();
  }
}

TEST(CairnsCaptures, MakeNoHandleOfCudnn) {
  const core::Device device{core::DeviceType::cuda, 0};
  core::Graph graph(device);
  const auto borrow_all = [&] {
    const kernels::cuda::Queue queue("conv2d", device);
    std::vector<std::unique_ptr<kernels::cuda::CudnnHandle>> held;
    while (held.size() < 1000) held.push_back(std::make_unique<kernels::cuda::CudnnHandle>(queue));
  };
  EXPECT_THAT([&] { graph.capture(borrow_all); },
              testing::ThrowsMessage<core::Unsupported>(
                  testing::HasSubstr("[cudnn] expected work that a graph can repeat, got a handle "
                                     "that no warm-up has left")));
}

TEST_P(Captures, AreNotMergedNorEndedByOthers) {
  const cudaStream_t one = new_stream(), other = new_stream(), third = new_stream();
  begin(one);
  begin(other);
  EXPECT_EQ(cudaStreamWaitEvent(other, recorded(one), 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(end(one), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(other), cudaErrorStreamCaptureInvalidated);
  begin(one);
  follow(third, one);
  EXPECT_EQ(end(third), cudaErrorStreamCaptureUnmatched);
  cudaError_t elsewhere = cudaSuccess;
  std::thread([&] { elsewhere = end(one); }).join();
  EXPECT_EQ(elsewhere, cudaErrorStreamCaptureWrongThread);
  follow(one, third);
  EXPECT_EQ(end(one), cudaSuccess);
  EXPECT_EQ(end(one), cudaErrorIllegalState);
}

// The default stream waits for streams that were not made to ignore it: it would be in the graph.
TEST_P(Captures, TheDefaultStreamIsOutOfReachOfACaptureThatItWouldWaitFor) {
  float* const x = device_floats();
  const cudaStream_t waits = new_stream(cudaStreamDefault), ignores = new_stream();
  begin(waits);
  EXPECT_EQ(cudaMemsetAsync(x, 0, kBytes, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end(waits), cudaErrorStreamCaptureInvalidated);
  begin(ignores);
  OK(cudaMemsetAsync(x, 0, kBytes, nullptr));
  EXPECT_EQ(cudaStreamWaitEvent(nullptr, recorded(ignores), 0), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end(ignores), cudaErrorStreamCaptureInvalidated);
  OK(cudaStreamDestroy(waits));
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  (void)cudaGetLastError();
}

// ---- Streams

TEST_P(Captures, StreamsThatWaitForTheDefaultStreamAreOrderedByIt) {
  const cudaStream_t one = new_stream(cudaStreamDefault), other = new_stream(cudaStreamDefault);
  float *const x = device_floats(), *const y = device_floats();
  launch_fill(one, x, kCount, 3.0f);
  launch_fill(nullptr, y, kCount, 1.0f);  // after all that they have
  launch_add(nullptr, x, y, kCount);
  launch_add(other, x, y, kCount);  // after that
  EXPECT_EQ(values_of(y, other), std::vector<float>(kCount, 7.0f));
  launch_fill(one, x, kCount, 5.0f);
  const cudaEvent_t event = recorded(nullptr);  // a point after their work too
  const cudaStream_t ignores = new_stream();
  OK(cudaStreamWaitEvent(ignores, event, 0));
  EXPECT_EQ(values_of(x, ignores), std::vector<float>(kCount, 5.0f));
  launch_fill(one, x, kCount, 6.0f);
  for (const cudaStream_t stream : {one, other}) OK(cudaStreamDestroy(stream));
  EXPECT_EQ(values_of(x, nullptr), std::vector<float>(kCount, 6.0f));  // after what it had
}

TEST_P(CapturesDeathTest, StreamsThatWaitForTheDefaultStreamRaceWithOneAnother) {
  const cudaStream_t one = new_stream(cudaStreamDefault), other = new_stream(cudaStreamDefault);
  float* const x = device_floats();
  EXPECT_DEATH(
      {
        launch_fill(one, x, kCount, 3.0f);
        launch_fill(other, x, kCount, 4.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: race");
  for (const cudaStream_t stream : {one, other}) OK(cudaStreamDestroy(stream));
}

// A cache by handle would take one stream for the other.
TEST_P(CapturesDeathTest, AHandleComesBackForAnotherStream) {
  const cudaStream_t first = new_stream();
  float* const x = device_floats();
  launch_fill(first, x, kCount, 3.0f);
  OK(cudaStreamDestroy(first));
  const cudaStream_t second = new_stream();
  EXPECT_EQ(first, second);
  EXPECT_DEATH(
      {
        launch_fill(second, x, kCount, 4.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: race");
  EXPECT_EQ(cudaStreamDestroy(new_stream()), cudaSuccess);
  OK(cudaDeviceSynchronize());
  EXPECT_EQ(values_of(x, second), std::vector<float>(kCount, 3.0f));
}

// ---- Peers

TEST(PeersDeathTest, AccessCanBeRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("CAIRN_SIM_PEERS", "0", 1);
  EXPECT_EXIT(
      {
        int can = 1;
        const bool refused = cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == 0 &&
                             cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported;
        std::exit(refused ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_DEATH(
      {
        cudaDeviceEnablePeerAccess(1, 0);
        cudaSetDevice(1);
        float* const theirs = device_floats();
        cudaSetDevice(0);
        launch_fill(nullptr, theirs, kCount, 1.0f);
        cudaDeviceSynchronize();
      },
      "gpusim: wrong device: a write .*work of cuda:0 has no peer access");
  unsetenv("CAIRN_SIM_PEERS");
}

}  // namespace
}  // namespace cairn::test
