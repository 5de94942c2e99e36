#include "formats/safetensors/model.h"

#include <filesystem>
#include <map>
#include <set>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "formats/json_text.h"
#include "io/file_io.h"
#include "io/printable.h"
#include "io/work_threads.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;
using LargeJson = nlohmann::json;

constexpr std::uint64_t kLargestIndex = 100'000'000;  // bytes

// A tensor that is read when it is used, where it is large enough for that.
Tensor deferred_tensor(const std::shared_ptr<const SafetensorsReader>& file,
                       const SafetensorsEntry& entry) {
  Tensor tensor = Tensor::empty(entry.shape, entry.dtype, Device{});
  if (!core::can_defer(tensor)) return file->read(entry);
  core::defer(tensor, {[file, &entry](const Tensor& to) { file->read_into(entry, to); },
                       core::str("'", entry.name, "' of a file whose header has the checksum ",
                                 file->header_checksum())});
  return tensor;
}

// The file's tensors; returns them under their other names.
FlatState read_model_file(const std::string& path, ReadTensors when, FlatState& state) {
  const auto file = std::make_shared<const SafetensorsReader>(path);
  std::vector<Tensor> tensors(file->entries().size());
  if (when == ReadTensors::now) {
    on_threads(threads_for(file->file_bytes()), tensors.size(),
               [&](std::size_t i) { tensors[i] = file->map(file->entries()[i]); });
  } else {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      tensors[i] = deferred_tensor(file, file->entries()[i]);
  }
  std::map<std::string, Tensor> stored;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = file->entries()[i].name;
    state.emplace_back(name, stored[name] = tensors[i]);
  }
  FlatState tied;
  for (const auto& [name, kept] : file->metadata()) {
    const auto found = stored.find(kept);
    if (found != stored.end() && !stored.contains(name)) tied.emplace_back(name, found->second);
  }
  return tied;
}

void append_to(FlatState& state, const FlatState& more) {
  state.insert(state.end(), more.begin(), more.end());
}

// Which file has which tensors.
std::map<std::string, std::set<std::string>> read_index(const std::string& path) {
  if (file_bytes(path) > kLargestIndex) {
    core::fail<core::DataError>("safetensors", "expected an index of at most ", kLargestIndex,
                                " bytes, got a longer one, '", path, "'");
  }
  const LargeJson index = parse_large_json(read_text(path), "safetensors", path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) {
    core::fail<core::DataError>("safetensors", "expected a weight_map in '", path, "', got none");
  }
  std::map<std::string, std::set<std::string>> files;
  for (const auto& [name, file] : map->items()) {
    const std::string text = file.is_string() ? file.get<std::string>() : "";
    if (text.empty() || text.find('/') != std::string::npos || text[0] == '.') {
      core::fail<core::DataError>("safetensors", "expected a file beside '", path, "' for '",
                                  printable(name), "', got ", printable(file.dump()));
    }
    files[text].insert(name);
  }
  return files;
}

FlatState read_indexed(const std::string& path, ReadTensors when) {
  FlatState state, tied;
  std::string problems;
  for (auto& [file, names] : read_index(path)) {
    const std::string full = (fs::path(path).parent_path() / file).string();
    if (!exists(full)) {
      problems += core::str("; the file '", printable(file), "' is missing");
      continue;
    }
    FlatState stored;
    append_to(tied, read_model_file(full, when, stored));
    append_to(state, stored);
    for (const auto& entry : stored) {
      if (names.erase(entry.first) == 1) continue;
      problems += core::str("; '", printable(entry.first), "' in ", printable(file),
                            " is not in the index");
    }
    for (const std::string& name : names)
      problems += core::str("; '", printable(name), "' is missing in ", printable(file));
  }
  append_to(state, tied);
  if (problems.empty()) return state;
  core::fail<core::DataError>("safetensors", "expected the files that '", path,
                              "' tells of, got others", problems);
}

}  // namespace

FlatState read_safetensors_model(const std::string& path, ReadTensors when) {
  const fs::path folder = path;
  if (fs::is_directory(path)) {
    const std::string index = (folder / kModelIndex).string();
    return read_safetensors_model(exists(index) ? index : (folder / kModelFile).string(), when);
  }
  if (path.ends_with(".json")) return read_indexed(path, when);
  FlatState state;
  append_to(state, read_model_file(path, when, state));
  return state;
}

}  // namespace cairn::checkpointing
