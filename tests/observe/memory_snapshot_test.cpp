// memory_snapshot.pickle as Python reads it and, where there is one, torch's own reader
// (scripts/fetch_libtorch), compared with what the allocator knew.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/memory_trace.h"
#include "cairn/core/tensor.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using core::MemoryCategory;
using core::MemoryCategoryGuard;
using nlohmann::json;
using testing::HasSubstr;

const Device kHost{};
const char* const kNoTorch = "no torch: run scripts/fetch_libtorch";

json read_snapshot(const std::string& folder) {
  const test::ShellResult result =
      test::shell("python3 -B " + test::test_folder() + "/observe/torch_memory_viz.py " + folder +
                  "/memory_snapshot.pickle");
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? json::parse(result.out) : json::object();
}

Tensor allocated(std::int64_t bytes, MemoryCategory category) {
  const MemoryCategoryGuard guard(category);
  return Tensor::empty({bytes}, DType::u8, kHost);
}

class TorchReadersOfMemory : public testing::Test {
 protected:
  void SetUp() override {
    core::release_cached_memory(kHost);
    core::reset_peak_memory(kHost);
    before_ = core::memory_stats(kHost);
  }
  std::string folder() const { return folder_.string(); }
  double grown(std::size_t now, std::size_t before) const {
    return static_cast<double>(now) - static_cast<double>(before);
  }
  core::MemoryStats before_;

 private:
  test::TemporaryFolder folder_;
};

// Sizes that are cut from cached blocks and put together of them.
TEST_F(TorchReadersOfMemory, SeeWhatTheAllocatorKnew) {
  std::vector<Tensor> kept;
  core::MemoryStats after;
  {
    observe::Run run(folder(), {.device = kHost, .memory_events = 10'000});
    for (int step = 0; step < 3; ++step) {
      observe::Span part(run, "forward");
      kept.push_back(allocated(100 + step, MemoryCategory::parameters));
      const Tensor a = allocated(9'000'000 + 3'000'000 * step, MemoryCategory::activations);
      part.next("backward");
      const core::MemoryLabel op("matmul");
      kept.push_back(allocated(4'000'000, MemoryCategory::gradients));
      run.step({{"loss", 1.0}});
    }
    kept[0].storage()->set_category(MemoryCategory::optimizer_state);
    after = core::memory_stats(kHost);
  }
  const json read = read_snapshot(folder());
  const json& replay = read["replay"];
  EXPECT_EQ(replay["live"], grown(after.current_total, before_.current_total));
  EXPECT_EQ(replay["peak"], grown(after.peak_total, before_.current_total));
  EXPECT_EQ(replay["reserved"], grown(after.reserved, before_.reserved));
  EXPECT_EQ(replay["categories"],
            (json{{"parameters", 101 + 102}, {"optimizer_state", 100}, {"gradients", 12'000'000}}));
  EXPECT_EQ(read["live"], after.current_total);
  EXPECT_EQ(read["reserved"], after.reserved);
  EXPECT_EQ(read["dropped"], 0);
  const json& torch = read["torch"];
  if (torch.is_null()) GTEST_SKIP() << kNoTorch;
  EXPECT_EQ(torch["unfreed"], replay["live"]);
  for (const MemoryCategory category :
       {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer_state}) {
    const std::string place(core::name(category));
    EXPECT_EQ(torch["blocks"]["active_allocated"][place], after.of(category)) << place;
  }
  EXPECT_THAT(torch["summary"].get<std::string>(), HasSubstr("total_reserved: "));
}

TEST_F(TorchReadersOfMemory, SeeStepsPartsAndOperations) {
  {
    observe::Run run(folder(), {.first_step = 6, .device = kHost, .memory_events = 100});
    const observe::Span part(run, "a part whose name is longer than a label");
    const Tensor a = allocated(10, MemoryCategory::workspace);
    const core::MemoryLabel op("matmul");
    run.step({{"loss", 1.0}});
    const Tensor b = allocated(10, MemoryCategory::gradients);
  }
  const json read = read_snapshot(folder());
  const auto frame = [](const char* name, const char* file, int line) {
    return json{{"name", name}, {"filename", file}, {"line", line}};
  };
  ASSERT_EQ(read["frames"].size(), 2u);
  EXPECT_EQ(read["frames"][0], json::array({frame("a part whose name is lo", "workspace", 7)}));
  EXPECT_EQ(read["frames"][1], json::array({frame("matmul", "gradients", 8),
                                            frame("a part whose name is lo", "gradients", 8)}));
  if (read["torch"].is_null()) GTEST_SKIP() << kNoTorch;
  EXPECT_THAT(read["torch"]["trace"].get<std::string>(), HasSubstr("Device 0"));
}

// The run's last moments stand in the file, not those after it; and no more than were asked for.
TEST_F(TorchReadersOfMemory, SeeARequestThatWasRefused) {
  const std::size_t capacity = core::memory_capacity(kHost);
  {
    observe::Run run(folder(), {.device = kHost, .memory_events = 5});
    for (int i = 0; i < 10; ++i) const Tensor gone = allocated(10, MemoryCategory::activations);
    const Tensor held = allocated(1000, MemoryCategory::activations);
    const std::size_t reserved = core::memory_stats(kHost).reserved;
    core::set_memory_capacity(kHost, reserved + 1000);
    EXPECT_THROW(allocated(static_cast<std::int64_t>(reserved) + 5000, MemoryCategory::workspace),
                 core::OutOfMemory);
    core::set_memory_capacity(kHost, capacity);
    allocated(2000, MemoryCategory::workspace);
  }
  const json read = read_snapshot(folder());
  EXPECT_EQ(read["actions"], (json{"free_requested", "free_completed", "segment_alloc", "alloc",
                                   "oom", "snapshot"}));
  EXPECT_GT(read["dropped"], 20);
  if (read["torch"].is_null()) GTEST_SKIP() << kNoTorch;
  EXPECT_THAT(read["torch"]["trace"].get<std::string>(), HasSubstr("raise OutOfMemoryError # "));
}

}  // namespace
}  // namespace cairn::observe
