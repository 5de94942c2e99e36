#include "formats/safetensors/model.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/state_file.h"
#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "formats/json_text.h"
#include "formats/printable.h"
#include "io/file_io.h"
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

namespace {

// The tensors of one file, and other names of theirs.
struct OutputFile {
  NamedTensors tensors;
  SafetensorsMetadata metadata = {{"format", "pt"}};
  std::uint64_t bytes = 0;
};

std::vector<OutputFile> files_of_state(const StateDict& state, std::uint64_t limit) {
  std::vector<OutputFile> shards(1);
  std::map<std::tuple<const void*, DType, std::string>, std::pair<std::size_t, std::string>> stored;
  for (const auto& [name, value] : flatten(state)) {
    const auto* tensor = std::get_if<Tensor>(&value);
    CAIRN_CHECK(tensor != nullptr && tensor->defined(), "safetensors",
                "expected tensors alone, as a model's state has them, got '", name, "'");
    const auto id = std::tuple(tensor->raw_data(), tensor->dtype(),
                               core::str(tensor->device(), tensor->shape(), tensor->strides()));
    const auto first = stored.find(id);
    if (first != stored.end() && tensor->nbytes() > 0) {
      shards[first->second.first].metadata.emplace_back(name, first->second.second);
      continue;
    }
    if (!shards.back().tensors.empty() && shards.back().bytes + tensor->nbytes() > limit) {
      shards.emplace_back();
    }
    stored.emplace(id, std::pair(shards.size() - 1, name));
    shards.back().tensors.push_back({name, *tensor});
    shards.back().bytes += tensor->nbytes();
  }
  return shards;
}

std::string shard_name(std::size_t i, std::size_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", i + 1, count);
  return text;
}

}  // namespace

void write_safetensors_model(const std::string& folder, const StateDict& state,
                             const SafetensorsModelOptions& options) {
  const std::vector<OutputFile> shards = files_of_state(state, options.file_bytes);
  const fs::path path = folder;
  make_folders(folder);
  if (shards.size() == 1) {
    write_safetensors((path / kModelFile).string(), shards[0].tensors, shards[0].metadata);
    return;
  }
  LargeJson index = {{"metadata", {{"total_size", 0}}}, {"weight_map", LargeJson::object()}};
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string file = shard_name(i, shards.size());
    write_safetensors((path / file).string(), shards[i].tensors, shards[i].metadata);
    for (const NamedTensor& entry : shards[i].tensors) index["weight_map"][entry.name] = file;
    total += shards[i].bytes;
  }
  index["metadata"]["total_size"] = total;
  WritableFile file((path / kModelIndex).string());
  file.write(index.dump(2) + "\n");
  file.close();
}

}  // namespace cairn::checkpointing
