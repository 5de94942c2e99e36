// What cairn-run finds on a machine, from made-up /proc, /sys and /dev.
#include "machine.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <fstream>

#include "shell.h"

namespace cairn::run {
namespace {

using test::TemporaryFolder;

int cores_by_affinity() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  return CPU_COUNT(&set);
}

class MachineTest : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  Machine machine() const { return Machine(root_.string()); }

  TemporaryFolder root_;
};

TEST_F(MachineTest, HasTheCoresOfItsAffinityWhereNoGroupLimitsThem) {
  EXPECT_EQ(machine().cores(), cores_by_affinity());
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(machine().cores(), cores_by_affinity());
}

TEST_F(MachineTest, TakesTheSmallestLimitOfTheGroupsAbove) {
  write("proc/self/cgroup", "0::/pod/job/step\n");
  write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");  // 1.5 cores: threads for one
  write("sys/fs/cgroup/pod/job/cpu.max", "6400000 100000\n");
  write("sys/fs/cgroup/pod/job/step/cpu.max", "max 100000\n");
  EXPECT_EQ(machine().cores(), 1);
}

TEST_F(MachineTest, SeesAContainersLimitThoughItsPathIsTheHosts) {
  write("proc/self/cgroup", "0::/kubepods/pod1\n");
  write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(machine().cores(), 1);
}

TEST_F(MachineTest, ReadsVersion1) {
  write("proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(machine().cores(), cores_by_affinity());
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "40000\n");
  EXPECT_EQ(machine().cores(), 1) << "less than one core is one thread";
}

TEST_F(MachineTest, CountsGpus) {
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(machine().gpus(), 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia"}) {
    write(std::string("dev/") + name, "");
  }
  EXPECT_EQ(machine().gpus(), 3);
  const std::pair<const char*, int> cases[] = {
      {"", 0}, {"-1", 0}, {"1", 1}, {"0,2", 2}, {"GPU-8f3a,GPU-11", 2}, {"0,-1,1", 1}};
  for (const auto& [list, count] : cases) {
    setenv("CUDA_VISIBLE_DEVICES", list, 1);
    EXPECT_EQ(machine().gpus(), count) << list;
  }
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_F(MachineTest, CountsMemoryNodesThatHaveItsCores) {
  EXPECT_EQ(machine().memory_nodes(), 1);
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  const auto node = [](int number) {
    return "sys/devices/system/node/node" + std::to_string(number);
  };
  write(node(0) + "/cpu" + std::to_string(cores.front()), "");
  write(node(1) + "/cpu" + std::to_string(cores.back()), "");
  write(node(2) + "/cpu100000", "");  // memory without a core of ours
  EXPECT_EQ(machine().memory_nodes(), std::min<int>(2, static_cast<int>(cores.size())));
}

}  // namespace
}  // namespace cairn::run
