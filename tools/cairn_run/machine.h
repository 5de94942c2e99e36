// What this machine offers to a job: cores, memory nodes, GPUs.
#pragma once

#include <filesystem>

namespace cairn::run {

class Machine {
 public:
  /// `root` is where /proc, /sys and /dev are looked for.
  explicit Machine(std::filesystem::path root = "/") : root_(std::move(root)) {}

  /// Cores that this process may keep busy, at least 1: its affinity, or the CPU time that the
  /// control groups above it grant (cpu.max, or cpu.cfs_quota_us in version 1), whichever is less.
  int cores() const;

  /// GPUs: those that CUDA_VISIBLE_DEVICES lists, or where it is not set one for each /dev/nvidiaN.
  int gpus() const;

  /// Memory (NUMA) nodes with a core that this process may run on: at least 1, at most cores().
  int memory_nodes() const;

 private:
  double granted_cores() const;

  std::filesystem::path root_;
};

}  // namespace cairn::run
