#include <algorithm>
#include <iostream>

#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"

namespace cairn::tools {

namespace {

// The parts: what ranks keep for themselves depends on how many there are.
Contents parts_of(const std::string& checkpoint) {
  Contents contents = read_contents(checkpoint);
  std::erase_if(contents, [](const auto& entry) { return entry.first.starts_with("rank-"); });
  return contents;
}

}  // namespace

int reshard(const std::string& in, const std::string& out, int world_size) {
  const std::string store = stores_of(in).front();
  if (!is_checkpoint(store)) {
    core::fail<core::DataError>("reshard", "expected a checkpoint, got '", store,
                                "' (convert reads it)");
  }
  const std::string made = checkpointing::reshard_checkpoint(store, out, world_size);
  const Differences all = compare(parts_of(store), parts_of(made), store, made);
  for (const std::string& line : all.lines) std::cout << line << '\n';
  if (!all.lines.empty()) {
    core::fail<core::DataError>("reshard", "expected the contents of '", store, "' in '", made,
                                "', got others");
  }
  std::cout << store << " -> " << made << ": " << world_size << " rank(s), " << all.entries
            << " entries, bit for bit the same\n";
  return 0;
}

}  // namespace cairn::tools
