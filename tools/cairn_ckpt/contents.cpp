#include "contents.h"

#include <algorithm>
#include <filesystem>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/state_file.h"
#include "io/printable.h"

namespace cairn::tools {

namespace fs = std::filesystem;

bool is_checkpoint(const std::string& store) {
  return fs::is_directory(store) &&
         checkpointing::kind_of_file(store) == checkpointing::FileKind::checkpoint;
}

std::vector<std::string> stores_of(const std::string& path) {
  if (!fs::is_directory(path) || fs::exists(fs::path(path) / "manifest.json")) return {path};
  std::vector<std::string> found = checkpointing::list_checkpoints(path);
  if (!found.empty()) return found;
  if (fs::exists(fs::path(path) / "state.safetensors")) return {path};  // its manifest is lost
  checkpointing::kind_of_file(path);
  return {path};
}

std::string printable(std::string_view text) {
  return checkpointing::escaped(text);
}

std::string printable_lines(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    out += (at > 0 ? "\n" : "") + printable(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

Contents read_contents(const std::string& store) {
  const bool lost_manifest =
      fs::is_directory(store) && fs::exists(fs::path(store) / "state.safetensors");
  if (!lost_manifest && !is_checkpoint(store)) {
    return checkpointing::flatten(checkpointing::read_state(store));
  }
  Contents contents = checkpointing::flatten(checkpointing::read_checkpoint(store));
  const auto summary = checkpointing::summarize_checkpoint(store);
  contents.insert(contents.begin(), {"(step)", summary.step});
  return contents;
}

}  // namespace cairn::tools
