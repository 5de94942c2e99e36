// A training through the C interface on the tested device, in its own stream, by two ranks: that of
// one process on the CPU, and what it saved goes on.
#include <cmath>

#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "calls.h"
#include "parallel/ranks.h"
#include "support/rank_device.h"
#include "support/tensors.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using core::BFloat16;

constexpr int kElements = 40, kOverflowAt = 4;

/// A caller's array in the memory of a device, whose work is in the caller's stream.
struct DeviceArray {
  DeviceArray(const char* array_name, DType dtype, core::Stream caller)
      : name(array_name), stream(std::move(caller)) {
    const core::StreamGuard guard(stream);
    tensor = Tensor::zeros({kElements}, dtype, stream.device());
  }
  void write(const std::vector<double>& values) const {
    const core::StreamGuard guard(stream);
    const Tensor host = Tensor::from(values, {kElements}, tensor.dtype(), Device{});
    core::copy_bytes(host.view(), tensor.view());
    stream.synchronize();  // the host's memory goes
  }
  std::vector<double> read() const {
    const core::StreamGuard guard(stream);
    return tensor.to_vector();
  }
  cairn_tensor described() const {
    static const int64_t shape[] = {kElements};
    const Device device = tensor.device();
    return {name,
            tensor.view().data,
            shape,
            1,
            tensor.dtype() == DType::bf16 ? CAIRN_BF16 : CAIRN_F32,
            device.is_cuda() ? CAIRN_CUDA : CAIRN_CPU,
            device.index};
  }

  const char* name;
  core::Stream stream;
  Tensor tensor;
};

core::Stream callers_stream(Device device) {
  return device.is_cuda() ? core::Stream::create(device, "caller")
                          : core::Stream::default_stream(device);
}

/// A bf16 weight whose gradients are averaged, unscaled, checked and clipped.
struct DeviceTraining {
  Device device;
  core::Stream stream = callers_stream(device);
  DeviceArray w{"w", DType::bf16, stream}, dw{"w", DType::bf16, stream};
  cairn_group* group = nullptr;
  cairn_reducer* reducer = nullptr;
  cairn_optimizer* optimizer = nullptr;
  cairn_scaled_step* scaled = nullptr;
  cairn_state* state = nullptr;
  int32_t rank = 0, ranks = 1;

  explicit DeviceTraining(Device where) : device(where) {
    if (device.is_cuda()) expect_ok(cairn_set_stream(device.index, stream.native()));
    std::vector<double> first;
    for (std::size_t i = 0; i < kElements; ++i) first.push_back(value_of(i, 1));
    w.write(first);
    const cairn_tensor weight = w.described(), gradient = dw.described();
    expect_ok(cairn_group_from_environment(&group));
    expect_ok(cairn_group_ranks(group, &rank, &ranks, nullptr, nullptr));
    expect_ok(cairn_reducer_create(group, nullptr, &gradient, nullptr, 1, &reducer));
    expect_ok(cairn_optimizer_create("adamw", "lr=0.02", &weight, &gradient, 1, &optimizer));
    expect_ok(cairn_scaled_step_create(optimizer, "init_scale=256", reducer, &scaled));
    expect_ok(cairn_state_create(nullptr, reducer, &state));
    expect_ok(cairn_state_add_weights(state, "model", optimizer));
    expect_ok(cairn_state_add(state, "optimizer", optimizer));
    expect_ok(cairn_state_add(state, "amp", scaled));
  }
  ~DeviceTraining() {
    for (void* handle : std::initializer_list<void*>{state, scaled, optimizer, reducer, group})
      expect_ok(cairn_free(handle));
    if (device.is_cuda()) expect_ok(cairn_set_stream(device.index, nullptr));
  }
  DeviceTraining(const DeviceTraining&) = delete;
  DeviceTraining& operator=(const DeviceTraining&) = delete;

  /// Of all ranks' gradients, each rank has those whose number it is, times the count of ranks.
  void write_gradient(int64_t step) const {
    double scale = 0;
    expect_ok(cairn_scaled_step_scale(scaled, &scale));
    std::vector<double> values(kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      const bool mine = static_cast<int32_t>(i) % ranks == rank;
      values[i] = mine ? value_of(i, 10 + static_cast<int>(step)) * scale * ranks : 0.0;
    }
    if (step == kOverflowAt && rank == ranks - 1) values[7] = INFINITY;
    dw.write(values);
  }
  void train(int64_t from, int64_t until, const std::string& folder) const {
    for (int64_t step = from; step < until; ++step) {
      write_gradient(step);
      expect_ok(cairn_reducer_mark_ready(reducer, 0));
      expect_ok(cairn_reducer_wait(reducer));
      cairn_step_result result;
      expect_ok(cairn_scaled_step_run(scaled, "max_gradient_norm=2", &result));
      EXPECT_EQ(result.applied, step == kOverflowAt ? 0 : 1) << result.reason;
      if (step == kOverflowAt) {
        EXPECT_STREQ(result.culprit, "w");
        EXPECT_THAT(result.reason,
                    testing::HasSubstr(ranks == 1 ? "inf in the gradient" : "rank 1"));
      }
      int64_t saved = 0;
      expect_ok(cairn_state_save_every(state, 3, folder.c_str(), &saved));
    }
  }
};

std::vector<double> trained_on_the_cpu(int64_t steps) {
  const core::DefaultDeviceGuard guard(Device{});
  const TemporaryFolder folder;
  DeviceTraining training{Device{}};
  training.train(0, steps, folder.string());
  return training.w.read();
}

TEST(CapiDevices, ATrainingIsThatOfTheCpuAndGoesOn) {
  const Device device = core::default_device();
  const TemporaryFolder folder;
  std::vector<double> weights;
  {
    DeviceTraining training(device);
    training.train(0, 8, folder.string());
    training.train(8, 11, "");  // nothing is saved of these
    weights = training.w.read();
  }
  expect_close(weights, trained_on_the_cpu(11), 0x1p-7, 0x1p-9);
  DeviceTraining resumed(device);
  int64_t step = 0;
  expect_ok(cairn_state_resume(resumed.state, folder.string().c_str(), &step));
  EXPECT_EQ(step, 6);
  resumed.train(step, 11, "");
  EXPECT_EQ(resumed.w.read(), weights);
}

TEST(CapiDevices, TwoRanksTrainWhatOneDoes) {
  if (!has_devices_of(2)) GTEST_SKIP() << "needs two GPUs";
  const auto ranks = start_ranks(2, [](int) {
    DeviceTraining training(core::default_device());
    training.train(0, 8, "");
    // The CPU's alone: this process's own job has two ranks.
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
      unsetenv(name);
    expect_close(training.w.read(), trained_on_the_cpu(8), 0x1p-7, 0x1p-9);
  });
  for (const RankResult& rank : ranks) EXPECT_EQ(rank.status, 0) << rank.output;
}

TEST(CapiDevices, ListsOfArraysAreMeasuredScaledAndClipped) {
  const core::Stream stream = callers_stream(core::default_device());
  const DeviceArray x("x", DType::bf16, stream), y("y", DType::f32, stream);
  if (stream.device().is_cuda())
    expect_ok(cairn_set_stream(stream.device().index, stream.native()));
  std::vector<double> values(kElements, 0.0);
  values[3] = 3, values[9] = -4;
  x.write(values);
  const cairn_tensor from = x.described(), to = y.described();
  double norm = 0;
  int64_t nonfinite = -1;
  expect_ok(cairn_tensors_norm(&from, 1, 2.0, &norm, &nonfinite));
  EXPECT_EQ(norm, 5);
  EXPECT_EQ(nonfinite, 0);
  expect_ok(cairn_tensors_scale(&from, &to, 1, 0.5));
  EXPECT_EQ(y.read()[9], -2);
  expect_ok(cairn_tensors_clip(&to, 1, 1.0, INFINITY, &norm));
  EXPECT_EQ(norm, 2);
  EXPECT_NEAR(y.read()[9], -1, 1e-5);
  values[5] = NAN;
  x.write(values);
  expect_ok(cairn_tensors_norm(&from, 1, 2.0, &norm, &nonfinite));
  EXPECT_EQ(nonfinite, 1);
  if (stream.device().is_cuda()) expect_ok(cairn_set_stream(stream.device().index, nullptr));
}

}  // namespace
}  // namespace cairn::test
