#include <filesystem>
#include <iostream>
#include <utility>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"

namespace cairn::tools {

namespace {

namespace fs = std::filesystem;

struct Verdict {
  const char* word;
  std::vector<std::string> lines;
};

// A disk that does not answer says nothing of what lies there.
Verdict verdict_of(const std::string& store) {
  try {
    const bool lost_manifest = fs::exists(fs::path(store) / "state.safetensors");
    const bool parts = lost_manifest || is_checkpoint(store);
    std::vector<std::string> damage;
    if (parts) damage = checkpointing::find_damage(store);
    if (!parts) read_contents(store);
    return {damage.empty() ? "good" : "damaged", std::move(damage)};
  } catch (const core::IoError& e) {
    return {"cannot be read", {e.what()}};
  } catch (const core::Error& e) {
    return {"damaged", {e.what()}};
  }
}

}  // namespace

int verify(const std::string& path) {
  int status = 0;
  for (const std::string& store : stores_of(path)) {
    const Verdict verdict = verdict_of(store);
    std::cout << printable(store) << ": " << verdict.word << '\n';
    for (const std::string& line : verdict.lines)
      std::cout << "  " << printable_lines(line) << '\n';
    if (verdict.word != std::string("good")) status = 1;
  }
  return status;
}

}  // namespace cairn::tools
