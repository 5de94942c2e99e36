// The commands of cairn-ckpt. Each prints what it finds and returns the exit status: 0, or 1 where
// something is damaged or differs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"

namespace cairn::tools {

int inspect(const std::string& path);
int verify(const std::string& path);
int diff(const std::string& a, const std::string& b);
/// Writes what `in` holds, or one dictionary of it, as the kind of file that the name `out` says.
int convert(const std::string& in, const std::string& out, const std::string& part);
/// Writes a checkpoint once more as a job of `world_size` ranks would have saved it, and compares
/// the two bit for bit.
int reshard(const std::string& in, const std::string& out, int world_size);
/// Removes what the rules do not keep of a folder's checkpoints.
int prune(const std::string& dir, const checkpointing::RetentionPolicy& rules, bool dry_run);
/// Writes what can still be read of a damaged checkpoint to `out`, and names what is lost.
int repair(const std::string& in, const std::string& out);

struct ProveResume {
  std::vector<std::string> command;  // "{dir}" in it stands for a run's folder
  std::string folder;                // for both runs; empty: a temporary one
  std::int64_t steps = 0;            // 0: as the program says
  std::int64_t kill_at = 1;          // kills when a checkpoint of this step or a later one stands
};
/// Runs a training unbroken, and again with a kill and a second start, and compares.
int prove_resume(const ProveResume& options);

}  // namespace cairn::tools
