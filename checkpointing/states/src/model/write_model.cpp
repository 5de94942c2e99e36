// A model's weights for others: by one process, or by all ranks, each its part of the same files.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "cairn/checkpointing/state_file.h"
#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "checkpoint/shards.h"
#include "formats/flat_state.h"
#include "formats/safetensors/format.h"
#include "formats/safetensors/model.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;

constexpr const char* kWhere = "write_safetensors_model";

// A tensor of the state, and which elements of it a rank has.
struct Held {
  std::string about;  // name, dtype, shape of the whole, and if it is cut: the same on every rank
  ElementRange elements;
  std::string tied;  // the first name of the same memory; nothing can be told of no elements
};

struct Entry {
  SafetensorsPart part;
  bool cut = false;
  Held held;
};

Entry entry_of(const std::string& name, const StateDict::Value& value) {
  const Tensor* tensor = tensor_in(value);
  CAIRN_CHECK(tensor != nullptr && tensor->defined(), "safetensors",
              "expected tensors alone, as a model's state has them, got '", name, "'");
  Entry entry{.part = {name, tensor->dtype(), tensor->shape(), *tensor}};
  entry.held.elements = {0, tensor->numel()};
  if (const auto* shard = std::get_if<Shard>(&value)) {
    const auto elements = elements_of(tensor->shape(), {shard->whole, shard->begin});
    CAIRN_CHECK(elements.has_value(), kWhere, "expected a shard within ", shard->whole, " as '",
                name, "', got ", tensor->shape(), " from ", shard->begin, " on");
    entry.part.shape = shard->whole;
    entry.part.begin = elements->begin;
    entry.held.elements = *elements;
    entry.cut = true;
  }
  entry.held.about = core::str("'", name, "' ", entry.part.dtype, " ", entry.part.shape,
                               entry.cut ? " in shards" : "");
  return entry;
}

std::vector<Entry> entries_of(const StateDict& state) {
  std::vector<Entry> entries;
  std::map<std::tuple<const void*, DType, std::string>, std::string> first;
  for (const auto& [name, value] : flatten(state)) {
    Entry& entry = entries.emplace_back(entry_of(name, value));
    const Tensor& x = entry.part.values;
    if (x.nbytes() == 0) continue;
    const auto memory = std::tuple(x.raw_data(), x.dtype(),
                                   core::str(x.device(), x.shape(), x.strides(), entry.part.begin));
    entry.held.tied = first.emplace(memory, name).first->second;
  }
  return entries;
}

std::string packed(const std::vector<Entry>& entries) {
  core::Packer message;
  for (const Entry& entry : entries) {
    message.text(entry.held.about).text(entry.held.tied);
    message.number(static_cast<std::uint64_t>(entry.held.elements.begin));
    message.number(static_cast<std::uint64_t>(entry.held.elements.end));
  }
  return message.bytes();
}

std::vector<Held> unpacked(const std::string& text) {
  std::vector<Held> all;
  core::Unpacker message(text);
  while (!message.rest().empty()) {
    Held& held = all.emplace_back();
    held.about = message.text();
    held.tied = message.text();
    held.elements.begin = static_cast<std::int64_t>(message.number());
    held.elements.end = static_cast<std::int64_t>(message.number());
  }
  return all;
}

void check_same(const std::vector<Held>& first, const std::vector<Held>& other, std::size_t rank) {
  const auto about = [](const std::vector<Held>& all, std::size_t i) {
    return i < all.size() ? all[i].about : std::string("no more");
  };
  for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
    CAIRN_CHECK(about(first, i) == about(other, i), kWhere,
                "expected the same tensors on every rank, got on rank 0 ", about(first, i),
                ", on rank ", rank, " ", about(other, i));
  }
}

// Of each part one rank writes it: the first that has it. Throws where parts are missing or lap.
void leave_to_first(Entry& entry, const std::vector<Held>& held, std::size_t own_rank) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> owners;
  for (std::size_t rank = 0; rank < held.size(); ++rank) {
    const auto [begin, end] = held[rank].elements;
    if (begin < end) owners.emplace(std::pair(begin, end), rank);
    const bool known = !held[rank].tied.empty(), ours = !entry.held.tied.empty();
    if (known && !ours) entry.held.tied = held[rank].tied;
    CAIRN_CHECK(!known || held[rank].tied == entry.held.tied, kWhere,
                "expected the same tied weights on every rank, got ", entry.held.about, " as '",
                entry.held.tied, "' and, on rank ", rank, ", as '", held[rank].tied, "'");
  }
  std::int64_t at = 0;
  for (const auto& [elements, rank] : owners) {
    CAIRN_CHECK(elements.first == at, kWhere, "expected each element of ", entry.held.about,
                " once, got a part of rank ", rank, " that begins at ", elements.first, " where ",
                at, " is next");
    at = elements.second;
  }
  CAIRN_CHECK(at == entry.part.shape.numel(), kWhere, "expected all elements of ", entry.held.about,
              ", got those up to ", at, " of ", entry.part.shape.numel(),
              " (does .world have every rank that holds shards?)");
  const auto own = owners.find(std::pair(entry.held.elements.begin, entry.held.elements.end));
  if (own == owners.end() || own->second != own_rank) entry.part.values = {};
}

// What the ranks' states have in common, and what of it this rank writes.
std::vector<Entry> agreed_entries(const StateDict& state, const World& world) {
  std::vector<Entry> entries;
  const std::vector<std::string> told = world.all_or_throw(kWhere, [&] {
    entries = entries_of(state);
    return packed(entries);
  });
  std::vector<std::vector<Held>> of_rank;
  of_rank.reserve(told.size());
  for (const std::string& text : told) of_rank.push_back(unpacked(text));
  for (std::size_t rank = 1; rank < of_rank.size(); ++rank)
    check_same(of_rank[0], of_rank[rank], rank);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::vector<Held> held;
    held.reserve(of_rank.size());
    for (const std::vector<Held>& all : of_rank) held.push_back(all[i]);
    leave_to_first(entries[i], held, static_cast<std::size_t>(world.rank));
  }
  return entries;
}

// The tensors of one file, and other names of theirs.
struct OutputFile {
  std::vector<SafetensorsPart> parts;
  SafetensorsMetadata metadata = {{"format", "pt"}};
  std::uint64_t bytes = 0;
};

std::vector<OutputFile> files_of(const std::vector<Entry>& entries, std::uint64_t limit) {
  std::vector<OutputFile> files(1);
  std::map<std::string, std::size_t> places;  // of names, in files
  for (const Entry& entry : entries) {
    const auto first = places.find(entry.held.tied);
    if (first != places.end()) {
      files[first->second].metadata.emplace_back(entry.part.name, entry.held.tied);
      continue;
    }
    const std::uint64_t bytes =
        core::size_of(entry.part.dtype) * static_cast<std::uint64_t>(entry.part.shape.numel());
    if (!files.back().parts.empty() && files.back().bytes + bytes > limit) files.emplace_back();
    places.emplace(entry.part.name, files.size() - 1);
    files.back().parts.push_back(entry.part);
    files.back().bytes += bytes;
  }
  return files;
}

std::string name_of_file(std::size_t i, std::size_t count) {
  if (count == 1) return kModelFile;
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", i + 1, count);
  return text;
}

void write_index(const std::string& path, const std::vector<OutputFile>& files) {
  nlohmann::json index = {{"metadata", {{"total_size", 0}}},
                          {"weight_map", nlohmann::json::object()}};
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = name_of_file(i, files.size());
    for (const SafetensorsPart& part : files[i].parts) index["weight_map"][part.name] = name;
    total += files[i].bytes;
  }
  index["metadata"]["total_size"] = total;
  WritableFile file(path);
  file.write(index.dump(2) + "\n");
  file.close();
}

}  // namespace

void write_safetensors_model(const std::string& folder, const StateDict& state,
                             const SafetensorsModelOptions& options) {
  const World& world = options.world;
  const auto files = files_of(agreed_entries(state, world), options.file_bytes);
  const fs::path path = folder;
  const auto on_first = [&](const std::function<void()>& work) {
    world.all_or_throw<core::IoError>(kWhere, [&] {
      if (world.rank == 0) work();
      return "";
    });
  };
  on_first([&] { make_folders(folder); });
  for (std::size_t i = 0; i < files.size(); ++i) {
    write_safetensors_parts((path / name_of_file(i, files.size())).string(), files[i].parts,
                            files[i].metadata, world);
  }
  if (files.size() > 1) on_first([&] { write_index((path / kModelIndex).string(), files); });
}

}  // namespace cairn::checkpointing
