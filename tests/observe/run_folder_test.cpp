// Where ranks put what explains a failure: one folder for all of them.
#include "cairn/core/run_folder.h"

#include <gtest/gtest.h>

#include "cairn/observe/run.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

TEST(RunFolder, IsThatOfAllRanks) {
  const test::TemporaryFolder folder;
  World world;
  world.rank = 1, world.size = 2;
  const observe::Run run(folder.string(), {.world = world});
  EXPECT_EQ(core::run_folder(), folder.string());
  EXPECT_EQ(run.folder(), folder.string() + "/rank-1");
}

}  // namespace
}  // namespace cairn::observe
