// A budget is of the process: nets of bench/budget_nets.h, each in a process of its own, against
// what the system says that it took.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/budget_nets.h"
#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/planner.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/nn/nn.h"
#include "support/cpu_only.h"
#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::checkpointing::process_budget {
namespace {

constexpr double kMegabyte = 1e6;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // a process of theirs takes more by far
#else
constexpr bool kSanitized = false;
#endif

struct Outcome {
  double process = 0, planning = 0;
  std::uint64_t gradients = 0;
  std::string schedule;
};

/// Not a test: what the others start.
TEST(ProcessBudgetChild, DISABLED_Trains) {
  const char* net = std::getenv("CAIRN_TEST_NET");
  const char* budget = std::getenv("CAIRN_TEST_BUDGET");
  if (net == nullptr || budget == nullptr) GTEST_SKIP() << "started by ProcessBudget";
  const bench::BudgetRun run = bench::run_within_budget(net, std::stoull(budget), 2);
  std::printf("\n%s\n", nlohmann::json{{"process", run.process},
                                       {"planning", run.planning},
                                       {"gradients", run.gradients},
                                       {"schedule", run.schedule}}
                            .dump()
                            .c_str());
}

Outcome train_in_child(const std::string& net, std::size_t budget) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command =
      core::str("OMP_NUM_THREADS=1 CAIRN_TEST_NET=", net, " CAIRN_TEST_BUDGET=", budget, " '",
                program, "' --gtest_also_run_disabled_tests --gtest_filter=ProcessBudgetChild.*");
  FILE* pipe = popen(command.c_str(), "r");  // NOLINT: a fixed command
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;) {
    text.append(part.data(), n);
  }
  EXPECT_EQ(pclose(pipe), 0) << text;
  const std::size_t begin = text.find("\n{");
  if (begin == std::string::npos) return {};
  const auto json =
      nlohmann::json::parse(text.substr(begin + 1, text.find('\n', begin + 1) - begin));
  return {json.at("process"), json.at("planning"), json.at("gradients"), json.at("schedule")};
}

class ProcessBudget : public testing::TestWithParam<const char*> {};

TEST_P(ProcessBudget, HoldsWhilePlanningAndTrainingWithTheBitsOfPlainTraining) {
  const Outcome plain = train_in_child(GetParam(), 0);
  for (const double share : {0.7, 0.9}) {
    const double budget = share * plain.process;
    const Outcome run = train_in_child(GetParam(), static_cast<std::size_t>(budget));
    EXPECT_EQ(run.gradients, plain.gradients) << run.schedule;
    EXPECT_NE(run.schedule, "");
    if (kSanitized) continue;
    EXPECT_LE(run.planning, 1.02 * budget + 8 * kMegabyte) << run.schedule;
    EXPECT_LE(run.process, 1.02 * budget + 8 * kMegabyte) << run.schedule;
    EXPECT_LT(run.process, plain.process) << run.schedule;
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, ProcessBudget, testing::Values("small_mlp", "bn_dropout", "unet"),
                         [](const auto& info) { return std::string(info.param); });

// ---- In this process

class Pressed : public testing::Test {
 protected:
  Tensor x_ = test::normal_tensor({1024, 256}, 2);
  nn::Sequential model_;

  void SetUp() override {
    CAIRN_CPU_ONLY("a GPU's budget is of its tensors");
    for (int i = 0; i < 8; ++i) {
      model_.add(nn::Linear(256, 256));
      model_.add(nn::GELU());
    }
  }
  RecomputationPlan plan(std::size_t budget) {
    return plan_recomputation(model_, x_, budget, {.repeats = 1});
  }
};

TEST_F(Pressed, PlanningLeavesTheProcessAsItWas) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer keeps what is freed";
  (void)plan(SIZE_MAX);  // code is used for the first time, and stays
  const std::size_t before = core::process_memory("VmRSS");
  (void)plan(SIZE_MAX);
  EXPECT_LE(core::process_memory("VmRSS"), before + (std::size_t{4} << 20));
}

TEST_F(Pressed, WhatElseTheProcessHoldsIsOfTheBudget) {
  if (kSanitized) GTEST_SKIP() << "the process is a sanitizer's";
  const auto least = [&] {
    const std::string message = test::message_of<core::OutOfMemory>([&] { (void)plan(1); });
    const std::string start = "a budget of at least ";
    return std::stoull(message.substr(message.find(start) + start.size()));
  };
  (void)least();
  const std::size_t alone = least();
  const std::vector<char> data(std::size_t{64} << 20, 'x');  // a trainer's own
  EXPECT_NEAR(static_cast<double>(least()), static_cast<double>(alone + data.size()),
              4 * kMegabyte);
}

// Blocks of eight size classes, none of which serves another's request.
TEST_F(Pressed, CachesStayWithinTheBudgetAfterThePlan) {
  if (kSanitized) GTEST_SKIP() << "the process is a sanitizer's";
  core::release_cached_memory(Device{});
  const std::size_t budget = core::process_memory("VmRSS") + (std::size_t{48} << 20);
  (void)plan(budget);
  for (std::int64_t eighths = 8; eighths < 16; ++eighths) {
    std::vector<Tensor> live;
    for (int i = 0; i < 16; ++i) live.push_back(Tensor::zeros({eighths * ((1 << 15) - 64)}));
  }
  EXPECT_LE(core::process_memory("VmRSS"), budget + (std::size_t{8} << 20));
  (void)plan(SIZE_MAX);  // lifts the bound
}

// Blocks run with the device capped at the budget, and the cap ends with the plan.
TEST(PlanningWithinABudget, IsCapped) {
  const Device device = core::default_device();
  const Tensor x = test::normal_tensor({64, 64}, 2).set_requires_grad(true);
  std::size_t most = 0;
  std::vector<Segment> blocks(4, [&](const Tensor& y) {
    most = std::max(most, core::memory_capacity(device));
    return autograd::tanh(y);
  });
  blocks.emplace_back([](const Tensor& y) { return autograd::sum(y); });
  const std::size_t before = core::memory_capacity(device),
                    budget = core::memory_stats(device).current_total + 20 * x.nbytes();
  (void)plan_recomputation(blocks, x, budget, {.tensors_only = true, .repeats = 1});
  EXPECT_EQ(most, budget);
  EXPECT_EQ(core::memory_capacity(device), before);
}

}  // namespace
}  // namespace cairn::checkpointing::process_budget
