// Saves that are killed, fail or lose power at each of their calls in turn, on a simulated disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "checkpointing/simulated_disk.h"
#include "checkpointing/small_state.h"

namespace cairn::checkpointing {
namespace {

using Fault = SimulatedDisk::Fault;

constexpr const char* kFolder = "/runs/mnist";

class KilledSave : public ::testing::Test {
 protected:
  // Saves a state that `value` fills; false where the fault that was planned stopped it.
  bool save(std::int64_t step, float value) {
    part_.change(value);
    bool saved = true;
    try {
      TrainingState({{"part", part_}}).save(kFolder, step);
    } catch (const SimulatedDisk::Killed&) {
      saved = false;
    } catch (const core::IoError&) {
      saved = false;
    }
    disk_.restart();
    return saved;
  }
  // What resume_latest finds: the value, or -1 for nothing.
  static float latest() {
    SmallState fresh;
    const auto found = TrainingState({{"part", fresh}}).resume_latest(kFolder);
    return found ? fresh.weight.data<float>()[0] : -1;
  }

  SimulatedDisk disk_;
  SystemCallsGuard guard_{disk_};
  SmallState part_;
};

TEST_F(KilledSave, OfAStepThatStandsLeavesTheOldOrTheNew) {
  ASSERT_TRUE(save(5, 1));
  bool saved = false;
  for (int calls = 1; !saved; ++calls) {
    disk_.plan(Fault::kill_all, calls);
    const float before = latest();
    saved = save(5, before + 1);
    const float after = latest();
    EXPECT_TRUE(after == before || after == before + 1) << "killed at call " << calls;
  }
}

}  // namespace
}  // namespace cairn::checkpointing
