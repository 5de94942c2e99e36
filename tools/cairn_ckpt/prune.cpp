#include <algorithm>
#include <iostream>

#include "cairn/core/error.h"
#include "commands.h"

namespace cairn::tools {

int prune(const std::string& dir, const checkpointing::RetentionPolicy& rules, bool dry_run) {
  const std::vector<std::string> all = checkpointing::list_checkpoints(dir);
  if (all.empty()) {
    core::fail<core::DataError>("prune", "expected a folder of checkpoints, got '", dir,
                                "' without any");
  }
  const std::vector<std::string> needless = checkpointing::prune_checkpoints(dir, rules, dry_run);
  for (const std::string& path : all) {
    const bool stays = std::find(needless.begin(), needless.end(), path) == needless.end();
    std::cout << path << ": " << (stays ? "stays" : dry_run ? "would go" : "removed") << '\n';
  }
  return 0;
}

}  // namespace cairn::tools
