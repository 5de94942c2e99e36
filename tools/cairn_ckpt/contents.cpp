#include "contents.h"

#include <filesystem>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/error.h"

namespace cairn::tools {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
  return fs::is_regular_file(path);
}

std::vector<std::string> stores_of(const std::string& path) {
  if (is_file(path) || fs::exists(fs::path(path) / "manifest.json")) return {path};
  std::vector<std::string> found = checkpointing::list_checkpoints(path);
  if (found.empty() && fs::exists(fs::path(path) / "state.safetensors")) return {path};
  if (found.empty()) {
    core::fail<core::DataError>("cairn-ckpt",
                                "expected a checkpoint, a folder of checkpoints or a "
                                "safetensors file, got '",
                                path, "' with neither");
  }
  return found;
}

std::string printable(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

Contents read_contents(const std::string& store) {
  if (!is_file(store)) {
    Contents contents = checkpointing::flatten(checkpointing::read_checkpoint(store));
    const auto summary = checkpointing::summarize_checkpoint(store);
    contents.insert(contents.begin(), {"(step)", summary.step});
    return contents;
  }
  Contents contents;
  const checkpointing::SafetensorsReader file(store);
  for (const auto& entry : file.entries()) contents.emplace_back(entry.name, file.read(entry));
  return contents;
}

}  // namespace cairn::tools
