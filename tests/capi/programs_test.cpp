// The programs of examples/capi as users run them: in C, Python and Rust.
#include <fstream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <thread>

#include "cairn/amp/scaled_step.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/optim/adam.h"
#include "cairn/parallel/reducer.h"
#include "calls.h"
#include "net.h"
#include "parallel/ranks.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kTrainer = CAIRN_CAPI_TRAINER;
const std::string kLibrary = CAIRN_C_LIBRARY;
const std::string kCapiRun = std::string(CAIRN_RUN_PROGRAM) + " --nproc-per-node 2 ";
const std::string kCapiProve = std::string(CAIRN_CKPT_PROGRAM) + " prove-resume --kill-at 20 -- ";

// A library under a sanitizer is loaded by no program that is not.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

std::string example(const std::string& name) {
  return test_folder() + "/../examples/capi/" + name;
}

std::string run(const std::string& command) {
  const ShellResult result = shell(command);
  EXPECT_EQ(result.status, 0) << command << "\n" << result.out << result.err;
  return result.out;
}

std::vector<double> losses_in(const std::string& output) {
  std::vector<double> losses;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find(" loss ");
    if (at != std::string::npos) losses.push_back(std::stod(line.substr(at + 6)));
  }
  return losses;
}

double mean_of_last(const std::vector<double>& losses, std::size_t count) {
  return std::accumulate(losses.end() - static_cast<std::ptrdiff_t>(count), losses.end(), 0.0) /
         static_cast<double>(count);
}

/// What trainer.c does, in C++: every name, option and number is its own.
void train_in_cxx(const parallel::ProcessGroup& group, const std::string& folder, int steps) {
  net model;
  net_begin(&model);
  const auto named = [](uint16_t* all) -> std::vector<std::pair<std::string, TensorView>> {
    return {{"w", {all, {HIDDEN, INPUTS}, DType::bf16}},
            {"b", {all + HIDDEN * INPUTS, {HIDDEN}, DType::bf16}},
            {"v", {all + HIDDEN * INPUTS + HIDDEN, {HIDDEN}, DType::bf16}}};
  };
  const auto weights = named(model.weights), slopes = named(model.gradients);
  NamedTensors parameters, gradients;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& [name, view] = weights[i];
    parameters.push_back(optim::wrap_parameter(name, view, slopes[i].second));
    gradients.push_back({name, Tensor::wrap(slopes[i].second)});
  }
  parallel::Reducer reducer(group);
  reducer.register_gradients(gradients);
  optim::FusedAdam optimizer(parameters, {.lr = 0.02, .weight_decay = 0.01});
  amp::ScaledStep scaled(optimizer, {.init_scale = 1024}, reducer.world());
  checkpointing::Tensors exact(parameters);
  checkpointing::TrainingState state(
      {{"model", exact}, {"optimizer", optimizer}, {"amp", scaled}, {"reducer", reducer}},
      reducer.world());
  const int rows = 32 / group.world_size();
  for (int step = 0; step < steps; ++step) {
    (void)net_backward(&model, step, group.rank() * rows, rows, static_cast<float>(scaled.scale()));
    for (std::size_t i = 3; i-- > 0;) reducer.mark_ready(i);
    reducer.wait();
    (void)scaled.step({.max_gradient_norm = 1.0});
    state.save_every(20, folder);
  }
}

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// Weights, masters, moments, scale and steps, all in one file.
void expect_same_state(const TemporaryFolder& c, const TemporaryFolder& cxx) {
  const std::string file = "step-00000060/state.safetensors";
  const std::string theirs = bytes_of(c / file);
  EXPECT_GT(theirs.size(), 1000u);
  EXPECT_TRUE(theirs == bytes_of(cxx / file));
}

TEST(CapiPrograms, CTrainsTheBitsOfCxx) {
  const TemporaryFolder c, cxx;
  run(kTrainer + " " + c.string() + " 60");
  train_in_cxx(parallel::ProcessGroup::single(), cxx.string(), 60);
  expect_same_state(c, cxx);
}

TEST(CapiPrograms, CTrainsTheBitsOfCxxInTwoProcesses) {
  const TemporaryFolder c, cxx;
  run(kCapiRun + kTrainer + " " + c.string() + " 60");
  run_threads(2, [&](parallel::ProcessGroup& group) { train_in_cxx(group, cxx.string(), 60); });
  expect_same_state(c, cxx);
}

TEST(CapiPrograms, CLearnsAndResumes) {
  const std::vector<double> losses = losses_in(run(kTrainer + " '' 300"));
  ASSERT_EQ(losses.size(), 300u);
  EXPECT_LT(mean_of_last(losses, 20), losses[0] / 10);
  EXPECT_THAT(run(kCapiProve + kCapiRun + kTrainer + " {dir} 400"), HasSubstr("resume: bit-exact"));
}

TEST(CapiPrograms, CSaysWhatIsWrong) {
  const ShellResult result = shell(kTrainer + " /proc/no 20");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("capi_trainer: IoError: "));
}

TEST(CapiPrograms, PythonLearnsAndResumesInTwoProcesses) {
  if (kSanitized) GTEST_SKIP() << "python3 is not sanitized";
  const std::string readers = test_folder() + "/../build/readers";  // where NumPy lies
  const std::string python = "env OMP_NUM_THREADS=1 PYTHONPATH=" + readers +
                             " CAIRN_C_LIBRARY=" + kLibrary + " python3 -B ";
  if (shell(python + "-c 'import numpy'").status != 0)
    GTEST_SKIP() << "no NumPy: run scripts/install_dependencies";
  const ShellResult result = shell(kCapiRun + python + example("trainer.py") + " '' 80");
  EXPECT_EQ(result.status, 0) << result.err;
  const std::vector<double> losses = losses_in(result.out);
  ASSERT_EQ(losses.size(), 80u);
  EXPECT_LT(mean_of_last(losses, 10), losses[0] / 2);
  EXPECT_THAT(result.err, HasSubstr("loss scale 1048576 -> 524288"));
  EXPECT_THAT(run(kCapiProve + kCapiRun + python + example("trainer.py") + " {dir} 80"),
              HasSubstr("resume: bit-exact"));
}

TEST(CapiPrograms, RustLearnsAndResumes) {
  if (kSanitized) GTEST_SKIP() << "Rust's programs are not sanitized";
  if (shell("rustc --version").status != 0)
    GTEST_SKIP() << "no rustc: run scripts/install_dependencies";
  const TemporaryFolder folder;
  const std::string at = std::filesystem::path(kLibrary).parent_path().string();
  const std::string program = (folder / "trainer").string();
  run("rustc -O -L " + at + " -C link-arg=-Wl,-rpath," + at + " -o " + program + " " +
      example("trainer.rs"));
  EXPECT_THAT(run(program + " '' 200"), HasSubstr("step 200 y = 3.0000"));
  EXPECT_THAT(run(kCapiProve + program + " {dir} 400"), HasSubstr("resume: bit-exact"));
  const ShellResult result = shell(program + " /proc/no 20");
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.err, HasSubstr("/proc/no"));
}

}  // namespace
}  // namespace cairn::test
