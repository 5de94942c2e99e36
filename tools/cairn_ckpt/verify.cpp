#include <iostream>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"

namespace cairn::tools {

namespace {

std::vector<std::string> damage_of(const std::string& store) {
  try {
    if (is_checkpoint(store)) return checkpointing::find_damage(store);
    read_contents(store);
  } catch (const core::Error& e) {
    return {e.what()};
  }
  return {};
}

}  // namespace

int verify(const std::string& path) {
  int status = 0;
  for (const std::string& store : stores_of(path)) {
    const std::vector<std::string> damage = damage_of(store);
    std::cout << store << ": " << (damage.empty() ? "good" : "damaged") << '\n';
    for (const std::string& line : damage) std::cout << "  " << line << '\n';
    if (!damage.empty()) status = 1;
  }
  return status;
}

}  // namespace cairn::tools
