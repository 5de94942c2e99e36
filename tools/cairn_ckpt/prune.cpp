#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"

namespace cairn::tools {

namespace {

namespace fs = std::filesystem;

// The newest line first, then those left behind, as saving counts them.
std::vector<std::string> in_order(const std::string& dir) {
  std::vector<std::string> order = checkpointing::newest_line(dir);
  for (const std::string& path : checkpointing::list_checkpoints(dir)) {
    if (std::find(order.begin(), order.end(), path) == order.end()) order.push_back(path);
  }
  return order;
}

// It loses its name, for good, before its first file.
void remove_checkpoint(const fs::path& path) {
  const fs::path folder = path.parent_path();
  std::string name = path.filename().string();
  name = name.starts_with(".") ? path.stem().string() : "." + name;
  const fs::path hidden = folder / (name + ".tmp");
  fs::remove_all(hidden);
  fs::rename(path, hidden);
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) {
    fsync(descriptor);
    close(descriptor);
  }
  fs::remove_all(hidden);
}

}  // namespace

int prune(const std::string& dir, int keep, bool only_say) {
  const std::vector<std::string> order = in_order(dir);
  if (order.empty()) {
    core::fail<core::DataError>("prune", "expected a folder of checkpoints, got '", dir,
                                "' without any");
  }
  int good = 0;
  std::vector<std::string> needless;
  for (const std::string& path : order) {
    const bool spare = good >= keep;
    if (!spare && checkpointing::find_damage(path).empty()) ++good;
    if (spare) needless.push_back(path);
    std::cout << path << ": " << (spare ? (only_say ? "would go" : "removed") : "stays") << '\n';
  }
  if (only_say) return 0;
  for (const std::string& path : needless) remove_checkpoint(path);
  return 0;
}

}  // namespace cairn::tools
