// Masters and moments in files: the bits of those in memory, in little memory.
#include <gmock/gmock.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "cairn/core/file_memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/optim/larc.h"
#include "support.h"

namespace cairn::optim {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "cairn-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// How weights, masters and moments are kept.
struct Form {
  std::string name;
  DType dtype = DType::f32;
  StateOptions states = {};
  bool masters = true;
};

std::vector<Form> forms() {
  return {{"f32"},
          {"f16", DType::f16},
          {"bf16", DType::bf16},
          {"compact", DType::bf16, {.moments = DType::bf16, .masters = MasterStorage::remainder}},
          {"no_masters", DType::bf16, {}, false}};
}

/// Row-major, stored with its dimensions exchanged, in part of a page, and in many pages.
NamedTensors parameters_of(DType dtype, std::int64_t rows) {
  const Device cpu;
  NamedTensors all = {make_parameter("weight", {rows, 67}, 1, dtype, cpu),
                      make_parameter("bias", {7}, 2, dtype, cpu),
                      make_parameter("norm", {3000}, 3, DType::f32, cpu)};
  Tensor turned = Tensor::empty_strided({40, 50}, {1, 40}, dtype, cpu);
  kernels::copy(make_parameter("", {40, 50}, 4, dtype, cpu).tensor, turned);
  all.push_back({"turned", turned.set_requires_grad(true)});
  return all;
}

struct Trained {
  Trained(const Rule& rule, const Form& form, const std::string& folder, std::int64_t rows = 91)
      : parameters(parameters_of(form.dtype, rows)),
        optimizer(rule.make({{parameters, 1e-2, 0.01}})) {
    StateOptions states = form.states;
    states.folder = folder;
    optimizer->set_state_options(states);
    optimizer->set_master_weights(form.masters);
  }
  StepResult step(std::uint64_t seed, const StepOptions& options = {}, double scale = 1.0) const {
    write_gradients(parameters, seed, scale);
    return optimizer->step(options);
  }
  std::vector<Values> all() const { return test::everything(parameters, *optimizer); }

  NamedTensors parameters;
  std::unique_ptr<Optimizer> optimizer;
};

class StatesInFiles : public testing::TestWithParam<std::tuple<Rule, Form>> {};

TEST_P(StatesInFiles, HaveTheBitsOfStatesInMemory) {
  const auto& [rule, form] = GetParam();
  const Folder folder;
  const Trained memory(rule, form, ""), files(rule, form, folder.path());
  for (std::uint64_t step = 0; step < 52; ++step) {
    const double scale = step == 20 ? kInf : 1.0;
    const StepOptions options{.gradient_scale = 0.5, .max_gradient_norm = step % 2 ? 0.3 : 0.0};
    const StepResult expected = memory.step(9 * step, options, scale);
    const StepResult got = files.step(9 * step, options, scale);
    ASSERT_EQ(got.applied, step != 20);
    ASSERT_EQ(got.reason, expected.reason);
    ASSERT_EQ(got.clip_coefficient, expected.clip_coefficient);
    if (step % 17 != 0) continue;
    ASSERT_EQ(files.all(), memory.all()) << step;
  }
  EXPECT_EQ(files.all(), memory.all());
  EXPECT_TRUE(folder.empty());
}

class StatesInBlocks : public StatesInFiles {};

TEST_P(StatesInBlocks, HaveThemToo) {
  const auto& [rule, form] = GetParam();
  const Folder folder;
  const std::int64_t rows = 2 * kernels::kFileBlock / 67 + 100;
  const Trained memory(rule, form, "", rows), files(rule, form, folder.path(), rows);
  for (std::uint64_t step = 0; step < 3; ++step) {
    expect_applied(memory.step(step));
    expect_applied(files.step(step));
  }
  EXPECT_EQ(files.all(), memory.all());
}

TEST_P(StatesInFiles, ComeAndGoBetweenSteps) {
  const auto& [rule, form] = GetParam();
  const Folder folder, another;
  const Trained memory(rule, form, ""), moves(rule, form, "");
  for (std::uint64_t step = 0; step < 8; ++step) {
    StateOptions states = form.states;
    states.folder = step % 4 == 0 ? "" : step % 4 == 1 ? another.path() : folder.path();
    moves.optimizer->set_state_options(states);
    expect_applied(memory.step(9 * step));
    expect_applied(moves.step(9 * step));
    ASSERT_EQ(moves.all(), memory.all()) << step;
  }
}

TEST_P(StatesInFiles, ResumeInMemoryAndTheOtherWayRound) {
  const auto& [rule, form] = GetParam();
  const Folder folder;
  const Trained memory(rule, form, ""), files(rule, form, folder.path());
  for (std::uint64_t step = 0; step < 4; ++step) {
    expect_applied(memory.step(9 * step));
    expect_applied(files.step(9 * step));
  }
  const StateDict of_memory = snapshot(memory.optimizer->state_dict());
  const StateDict of_files = snapshot(files.optimizer->state_dict());
  ASSERT_EQ(test::flat(of_memory), test::flat(of_files));
  memory.optimizer->load_state_dict(of_files);
  files.optimizer->load_state_dict(of_memory);
  expect_applied(memory.step(50));
  expect_applied(files.step(50));
  EXPECT_EQ(files.all(), memory.all());
}

INSTANTIATE_TEST_SUITE_P(, StatesInFiles,
                         testing::Combine(testing::ValuesIn(rules()), testing::ValuesIn(forms())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
                         });

INSTANTIATE_TEST_SUITE_P(, StatesInBlocks,
                         testing::Combine(testing::Values(rules()[0], rules()[4], rules()[6]),
                                          testing::Values(forms()[2], forms()[3])),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
                         });

const Rule& adam() {
  static const Rule rule = rules().front();
  return rule;
}
const Form kHalf{"bf16", DType::bf16};

TEST(StatesOnDisk, LieThereFromTheFirstStepOn) {
  const Folder folder;
  const auto in_memory = [] {
    return core::memory_stats(Device{}).of(core::MemoryCategory::optimizer_state);
  };
  const std::size_t before = in_memory();
  const Trained trained(adam(), kHalf, folder.path());
  for (std::uint64_t step = 0; step < 2; ++step) {
    expect_applied(trained.step(step));
    const Tensor master = kernels::MasterWeight::of(trained.parameters[0].tensor)->tensor();
    EXPECT_TRUE(core::lies_in_file(master));
    const StateDict state = trained.optimizer->state_dict();
    const auto moment = [&](const char* name) {
      return std::get<Tensor>(*state.dict("state").dict(name).find("exp_avg_sq"));
    };
    EXPECT_TRUE(core::lies_in_file(moment("weight")));
    EXPECT_TRUE(core::lies_in_file(moment("turned")));
    EXPECT_FALSE(core::lies_in_file(moment("bias")));  // is not worth a file
  }
  EXPECT_EQ(in_memory() - before, 7u * (4 + 8));
  trained.optimizer->set_state_options({});
  EXPECT_FALSE(
      core::lies_in_file(kernels::MasterWeight::of(trained.parameters[0].tensor)->tensor()));
  EXPECT_GT(in_memory() - before, 6097u * (4 + 8));
}

TEST(StatesOnDisk, FollowWhatIsWrittenIntoWeights) {
  const Folder folder;
  const Trained memory(adam(), kHalf, ""), files(adam(), kHalf, folder.path());
  for (std::uint64_t step = 0; step < 6; ++step) {
    for (const Trained* trained : {&memory, &files}) {
      if (step == 2) kernels::fill(trained->parameters[0].tensor.view().slice(0, 3, 40), 0.25);
      if (step == 4) {
        const Tensor& weight = trained->parameters[3].tensor;
        kernels::write_weight(weight, Tensor::full(weight.shape(), 1.0 / 3), true);
      }
      expect_applied(trained->step(9 * step));
    }
    ASSERT_EQ(files.all(), memory.all()) << step;
  }
}

TEST(StatesOnDisk, AMoveFollowsTheWeight) {
  const Folder folder;
  const Trained memory(adam(), kHalf, ""), moves(adam(), kHalf, "");
  for (const Trained* trained : {&memory, &moves}) {
    expect_applied(trained->step(1));
    kernels::fill(trained->parameters[0].tensor.view().slice(0, 3, 40), 0.25);
  }
  moves.optimizer->set_state_options({.folder = folder.path()});
  expect_applied(memory.step(2));
  expect_applied(moves.step(2));
  EXPECT_EQ(moves.all(), memory.all());
}

TEST(StatesOnDisk, HaveTheirBitsWithinLarc) {
  const Folder folder;
  for (const Form& form : forms()) {
    const Rule sgd = rules()[2];
    Trained memory(sgd, form, ""), files(sgd, form, folder.path());
    LARC of_memory(*memory.optimizer), of_files(*files.optimizer);
    for (std::uint64_t step = 0; step < 5; ++step) {
      expect_applied(memory.step(9 * step));
      expect_applied(files.step(9 * step));
    }
    EXPECT_EQ(files.all(), memory.all()) << form.name;
  }
}

TEST(StatesOnDisk, HaveTheirBitsOnAStreamOfWorkers) {
  const Folder folder;
  const std::int64_t rows = 2 * kernels::kFileBlock / 67;
  const Trained memory(adam(), kHalf, "", rows), files(adam(), kHalf, folder.path(), rows);
  for (std::uint64_t step = 0; step < 3; ++step) expect_applied(memory.step(step));
  const core::Stream stream = core::Stream::create({});
  {
    const core::StreamGuard guard(stream);
    for (std::uint64_t step = 0; step < 3; ++step) expect_applied(files.step(step));
  }
  stream.synchronize();
  EXPECT_EQ(files.all(), memory.all());
}

// ---- Memory

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// The most that a step of 6 million bf16 parameters has in memory beyond weights and gradients:
/// they have 24 MiB of masters and 24 of momenta.
std::size_t most_in_a_step(const StateOptions& states, bool larc) {
  const NamedTensors parameters = {make_parameter("a", {3 << 20}, 1, DType::bf16, Device{}),
                                   make_parameter("b", {3, 1 << 20}, 2, DType::bf16, Device{})};
  FusedSGD optimizer(parameters, {.momentum = 0.9});
  optimizer.set_state_options(states);
  std::optional<LARC> within;
  if (larc) within.emplace(optimizer);
  write_gradients(parameters, 1, 1e-3);
  core::release_cached_memory({});
  const std::size_t before = core::process_memory("VmRSS");
  expect_applied(optimizer.step());  // masters are made here, each in memory at first
  write_gradients(parameters, 2, 1e-3);
  core::release_cached_memory({});
  core::reset_most_process_memory();
  expect_applied(optimizer.step());
  return core::process_memory("VmHWM") - std::min(before, core::process_memory("VmHWM"));
}

TEST(StatesOnDisk, AreInMemoryABlockAtATime) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has memory of its own beside the program's";
#endif
  const Folder folder;
  // A block has 2^19 elements of a master and a momentum: 4 MiB.
  EXPECT_LE(most_in_a_step({.folder = folder.path()}, false), 2 * 4 * kMiB + 3 * kMiB);
  EXPECT_LE(most_in_a_step({.moments = DType::bf16, .folder = folder.path()}, false), 9 * kMiB);
  EXPECT_GE(most_in_a_step({}, false), 46 * kMiB);
}

TEST(StatesOnDisk, LarcMeasuresOneMasterAtATime) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has memory of its own beside the program's";
#endif
  const Folder folder;
  EXPECT_LE(most_in_a_step({.folder = folder.path()}, true), 12 * kMiB + 3 * kMiB);
}

TEST(StatesOnDisk, OfF32WeightsNeverLieInMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has memory of its own beside the program's";
#endif
  const Folder folder;
  const NamedTensors parameters = {make_parameter("w", {8 << 20}, 1, DType::f32, Device{})};
  FusedAdagrad optimizer(parameters, {.initial_accumulator = 0.5});
  optimizer.set_state_options({.folder = folder.path()});
  write_gradients(parameters, 1);
  core::release_cached_memory({});
  core::reset_most_process_memory();
  const std::size_t before = core::process_memory("VmRSS");
  expect_applied(optimizer.step());  // makes the sums: 32 MiB
  const StateDict state = optimizer.state_dict();
  optimizer.set_state_options({.moments = DType::bf16, .folder = folder.path()});
  const StateDict converted = optimizer.state_dict();
  EXPECT_LE(core::process_memory("VmHWM") - before, 8 * kMiB);
  const Tensor sums = std::get<Tensor>(*converted.dict("state").dict("w").find("sum"));
  const auto* first = sums.view().slice(0, 5 << 20, 6 << 20).as<float>();
  EXPECT_GE(*std::min_element(first, first + (1 << 10)), 0.5f);  // 0.5 + g^2
}

// ---- Mistakes

TEST(StatesOnDisk, RefusesAFolderThatCannotBe) {
  EXPECT_THROW(Trained(adam(), kHalf, "/no/such/folder"), core::IoError);  // before any step
  const Trained trained(adam(), kHalf, "");
  expect_applied(trained.step(1));
  const std::vector<Values> before = trained.all();
  for (const char* folder : {"/no/such/folder", "/proc"}) {
    EXPECT_THAT(message_of<core::IoError>(
                    [&] { trained.optimizer->set_state_options({.folder = folder}); }),
                AllOf(HasSubstr(folder), HasSubstr("a folder that is there")));
    EXPECT_EQ(trained.optimizer->state_options().folder, "");
  }
  EXPECT_EQ(trained.all(), before);
}

/// Runs f while no file may be larger, as on a disk that is full.
template <class F>
void on_a_full_disk(std::size_t bytes, F&& f) {
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit full = before;
  full.rlim_cur = bytes;
  setrlimit(RLIMIT_FSIZE, &full);
  f();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
}

TEST(StatesOnDisk, AFullDiskChangesNothing) {
  const Folder folder;
  const Trained memory(adam(), kHalf, ""), files(adam(), kHalf, folder.path());
  expect_applied(memory.step(1));
  write_gradients(files.parameters, 1);
  const std::vector<Values> weights = values(files.parameters);
  std::string message;
  on_a_full_disk(16000, [&] {  // of the masters, the first does not fit
    message = message_of<core::IoError>([&] { (void)files.optimizer->step(); });
  });
  EXPECT_THAT(message, AllOf(HasSubstr("reserve 24388 bytes"), HasSubstr(folder.path()),
                             HasSubstr("more room")));
  EXPECT_EQ(values(files.parameters), weights);
  EXPECT_EQ(files.optimizer->steps(), 0);
  expect_applied(files.optimizer->step());  // with the gradients that are still there
  EXPECT_EQ(files.all(), memory.all());
}

/// Puts the end of an empty file in place of a tensor's first page: it cannot be read.
void fail_to_read(const TensorView& x) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % page, 0u);
  const int empty = memfd_create("empty", 0);
  void* mapped =
      ::mmap(x.data, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty, /*offset=*/0);
  ASSERT_EQ(mapped, x.data);
  ::close(empty);
}

class FailingDisk : public testing::TestWithParam<Rule> {};

/// In the second group: LAMB has written moments of the first one by then, and no weights.
TEST_P(FailingDisk, StopsTheTrainingInTheMiddleUntilAStateIsLoaded) {
  const Folder folder;
  const NamedTensors all = parameters_of(DType::bf16, 91);
  const NamedTensors parameters = {all[0], all[3]};
  const auto optimizer = GetParam().make({{{all[0]}, 1e-2, 0.01}, {{all[3]}, 1e-3, 0.01}});
  const auto step = [&](std::uint64_t seed) {
    write_gradients(parameters, seed);
    return optimizer->step();
  };
  expect_applied(step(1));
  const StateDict saved = optimizer->state_dict();
  optimizer->set_state_options({.folder = folder.path()});
  expect_applied(step(2));
  {
    const StateDict state = optimizer->state_dict();
    fail_to_read(std::get<Tensor>(*state.dict("state").dict("turned").find("exp_avg")));
  }
  EXPECT_THAT(message_of<core::IoError>([&] { (void)step(3); }), HasSubstr("the disk fails"));
  for (int again = 0; again < 2; ++again) {
    EXPECT_THAT(message_of([&] { (void)step(3); }),
                AllOf(HasSubstr("resume from a checkpoint"), HasSubstr("the disk fails")));
    EXPECT_THAT(message_of([&] { (void)optimizer->state_dict(); }),
                HasSubstr("stopped after a part of the weights"));
    optimizer->clear_grad();
  }
  EXPECT_EQ(optimizer->steps(), 2);
  optimizer->load_state_dict(saved);
  expect_applied(step(2));
}

INSTANTIATE_TEST_SUITE_P(Rules, FailingDisk, testing::Values(rules().front(), rules().back()),
                         [](const auto& info) { return info.param.name; });

TEST(StatesOnDisk, AMoveThatFailsLeavesThemWhereTheyAre) {
  const Folder folder;
  const Trained memory(adam(), kHalf, ""), moves(adam(), kHalf, "");
  expect_applied(memory.step(1));
  expect_applied(moves.step(1));
  on_a_full_disk(16000, [&] {
    EXPECT_THROW(moves.optimizer->set_state_options({.folder = folder.path()}), core::IoError);
  });
  EXPECT_EQ(moves.optimizer->state_options().folder, "");
  expect_applied(memory.step(2));
  expect_applied(moves.step(2));
  EXPECT_EQ(moves.all(), memory.all());
}

TEST(StatesOnDisk, AreNotForCapturableSteps) {
  const Folder folder;
  const Trained files(adam(), kHalf, folder.path()), memory(adam(), kHalf, "");
  EXPECT_THAT(message_of<core::Unsupported>([&] { files.optimizer->set_capturable(true); }),
              HasSubstr("without a folder"));
  memory.optimizer->set_capturable(true);
  EXPECT_THAT(message_of<core::Unsupported>(
                  [&] { memory.optimizer->set_state_options({.folder = folder.path()}); }),
              AllOf(HasSubstr(folder.path()), HasSubstr("set_capturable(false)")));
}

}  // namespace
}  // namespace cairn::optim
