// Training states: what is saved comes back, and what cannot is told.
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "calls.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using core::BFloat16;

/// A training of a bf16 weight with an overflow now and then, and an array of its own.
struct Training {
  Array<BFloat16> w{"layer.w", {40}, values_of<BFloat16>(40, 1)};
  Array<BFloat16> dw{"dw", {40}, std::vector<BFloat16>(40)};
  Array<int64_t> seen{"seen", {2}, {0, 0}};
  cairn_optimizer* optimizer = nullptr;
  cairn_scaled_step* scaled = nullptr;
  cairn_scaler* scaler = nullptr;
  cairn_state* state = nullptr;
  int64_t step = 0;

  explicit Training(const char* options = nullptr) {
    const cairn_tensor weight = w.tensor(), gradient = dw.tensor(), own = seen.tensor();
    expect_ok(cairn_optimizer_create("adamw", "lr=0.02", &weight, &gradient, 1, &optimizer));
    expect_ok(cairn_scaled_step_create(optimizer, "init_scale=256", nullptr, &scaled));
    expect_ok(cairn_scaler_create("init_scale=8", &scaler));
    expect_ok(cairn_state_create(options, nullptr, &state));
    expect_ok(cairn_state_add_weights(state, "model", optimizer));
    expect_ok(cairn_state_add(state, "optimizer", optimizer));
    expect_ok(cairn_state_add(state, "amp", scaled));
    expect_ok(cairn_state_add(state, "other", scaler));
    expect_ok(cairn_state_add_tensors(state, "mine", &own, 1));
  }
  ~Training() {
    for (void* handle : std::initializer_list<void*>{state, scaler, scaled, optimizer})
      expect_ok(cairn_free(handle));
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  double scale() const {
    double value = 0;
    expect_ok(cairn_scaled_step_scale(scaled, &value));
    return value;
  }
  double other_scale() const {
    double value = 0;
    expect_ok(cairn_scaler_scale(scaler, &value));
    return value;
  }
  void train(int64_t until, const std::string& folder) {
    cairn_step_result result;
    while (step < until) {
      dw.fill(static_cast<int>(step), static_cast<float>(scale()));
      if (step % 4 == 1) dw.values[7] = BFloat16(INFINITY);
      expect_ok(cairn_scaled_step_run(scaled, nullptr, &result));
      expect_ok(cairn_scaler_update(scaler, result.applied == 0 ? 1 : 0));
      seen.values[0] += 10;
      seen.values[1] -= 1;
      expect_ok(cairn_state_save_every(state, 3, folder.c_str(), &step));
    }
  }
  std::vector<float> weights() const { return {w.values.begin(), w.values.end()}; }
};

TEST(CapiState, AResumedTrainingHasTheBitsOfTheUnbroken) {
  const TemporaryFolder folder, other;
  Training unbroken;
  unbroken.train(11, folder.string());
  {
    Training killed;
    killed.train(8, other.string());  // saved at 3 and 6
  }
  Training resumed;
  int64_t step = -1;
  expect_ok(cairn_state_resume(resumed.state, other.string().c_str(), &step));
  EXPECT_EQ(step, 6);
  EXPECT_EQ(resumed.seen.values[0], 60);
  EXPECT_EQ(resumed.seen.values[1], -6);
  resumed.step = step;
  resumed.train(11, other.string());
  EXPECT_EQ(resumed.weights(), unbroken.weights());
  EXPECT_EQ(resumed.scale(), unbroken.scale());
  EXPECT_LT(resumed.scale(), 256);
  EXPECT_EQ(resumed.other_scale(), unbroken.other_scale());
  EXPECT_LT(resumed.other_scale(), 8);
  int64_t steps = 0, expected = 0;
  expect_ok(cairn_optimizer_steps(resumed.optimizer, &steps));
  expect_ok(cairn_optimizer_steps(unbroken.optimizer, &expected));
  EXPECT_EQ(steps, expected);
}

TEST(CapiState, ASignalSavesAndEndsTheProcess) {
  const TemporaryFolder folder;
  const auto train_until_told = [&] {
    Training training;
    expect_ok(cairn_state_save_on_signal(training.state, SIGTERM, folder.string().c_str()));
    training.train(4, folder.string());
    raise(SIGTERM);
    training.train(20, folder.string());
  };
  EXPECT_EXIT(train_until_told(), testing::ExitedWithCode(75), "");
  Training resumed;
  int64_t step = -1;
  expect_ok(cairn_state_resume(resumed.state, folder.string().c_str(), &step));
  EXPECT_EQ(step, 5);
  EXPECT_EQ(resumed.seen.values[0], 50);
}

TEST(CapiState, AnEmptyFolderStartsAnew) {
  const TemporaryFolder folder;
  Training training;
  int64_t step = -1;
  expect_ok(cairn_state_resume(training.state, folder.string().c_str(), &step));
  EXPECT_EQ(step, 0);
  EXPECT_EQ(training.weights(), values_of<float>(40, 1));
}

TEST(CapiState, InTheBackgroundTheSameIsSaved) {
  const TemporaryFolder folder;
  Training training("asynchronous=1 keep=1");
  training.train(6, folder.string());
  expect_ok(cairn_state_finish(training.state));
  Training resumed;
  int64_t step = -1;
  expect_ok(cairn_state_resume(resumed.state, folder.string().c_str(), &step));
  EXPECT_EQ(step, 6);
  EXPECT_EQ(resumed.weights(), training.weights());
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000003"));
}

TEST(CapiState, DamageIsToldAndChangesNothing) {
  const TemporaryFolder folder;
  {
    Training training;
    training.train(3, folder.string());
    expect_ok(cairn_state_save(training.state, folder.string().c_str(), 3));
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.string())) {
    if (entry.path().filename() != "state.safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-2, std::ios::end);
    file.put('\x55');
  }
  Training training;
  int64_t step = -1;
  expect_failed(cairn_state_resume(training.state, folder.string().c_str(), &step),
                CAIRN_DATA_ERROR, {"state.safetensors"});
  EXPECT_EQ(step, -1);
  EXPECT_EQ(training.weights(), values_of<float>(40, 1));
}

TEST(CapiState, WhatDoesNotFitIsTold) {
  const TemporaryFolder folder;
  {
    Training training;
    training.train(3, folder.string());
  }
  Array<float> other("another", {2}, {1, 2});
  const cairn_tensor tensor = other.tensor();
  cairn_state* state = nullptr;
  expect_ok(cairn_state_create(nullptr, nullptr, &state));
  expect_ok(cairn_state_add_tensors(state, "mine", &tensor, 1));
  int64_t step = -1;
  expect_failed(cairn_state_resume(state, folder.string().c_str(), &step), CAIRN_DATA_ERROR,
                {"another", "seen"});
  expect_ok(cairn_free(state));
}

TEST(CapiState, WrongCallsAreTold) {
  const TemporaryFolder folder;
  Training training;
  const cairn_tensor weight = training.w.tensor(), own = training.seen.tensor();
  cairn_state* state = nullptr;
  expect_failed(cairn_state_create("kept=3", nullptr, &state), CAIRN_INVALID_ARGUMENT, {"kept"});
  expect_ok(cairn_state_create(nullptr, nullptr, &state));
  expect_failed(cairn_state_add_tensors(state, "model", &weight, 1), CAIRN_INVALID_ARGUMENT,
                {"'layer.w'", "cairn_state_add_weights"});
  expect_failed(cairn_state_add(state, "state", state), CAIRN_INVALID_ARGUMENT, {"'state'"});
  const cairn_tensor twice[] = {own, own};
  expect_failed(cairn_state_add_tensors(state, "mine", twice, 2), CAIRN_INVALID_ARGUMENT, {"seen"});
  expect_ok(cairn_state_add_tensors(state, "mine", &own, 1));
  expect_failed(cairn_state_save(state, "/proc/no", 1), CAIRN_IO_ERROR, {"/proc/no"});
  expect_failed(cairn_state_save(state, folder.string().c_str(), -1), CAIRN_INVALID_ARGUMENT,
                {"-1"});
  expect_ok(cairn_state_save(state, folder.string().c_str(), 1));
  expect_failed(cairn_state_add_tensors(state, "more", &own, 1), CAIRN_ERROR, {"'more'"});
  expect_ok(cairn_free(state));
}

}  // namespace
}  // namespace cairn::test
