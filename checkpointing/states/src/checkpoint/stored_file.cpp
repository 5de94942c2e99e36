#include "checkpoint/stored_file.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "cairn/core/error.h"
#include "formats/safetensors/format.h"
#include "io/file_io.h"
#include "io/printable.h"
#include "io/work_threads.h"

namespace cairn::checkpointing {

ManifestFile write_stored_file(const std::string& folder, const std::string& name,
                               const FlatState& entries, SafetensorsMetadata metadata) {
  ManifestFile file;
  file.name = name;
  NamedTensors tensors;
  std::vector<std::size_t> entry_of_tensor;
  for (const auto& [entry_name, value] : entries) {
    CAIRN_CHECK(usable_name(entry_name), "save",
                "expected names of at most 64 non-empty keys without control characters, got '",
                printable(entry_name), "'");
    CheckpointEntry entry;
    entry.name = entry_name;
    entry.file = name;
    entry.kind = kind_of(value);
    if (const auto* text = std::get_if<std::string>(&value)) entry.text = *text;
    if (const auto* shard = std::get_if<Shard>(&value)) entry.shard = {shard->whole, shard->begin};
    const Tensor tensor = tensor_of(value);
    CAIRN_CHECK(tensor.defined() || entry.kind != EntryKind::tensor, "save",
                "expected a tensor for '", entry_name, "', got an undefined one");
    if (tensor.defined()) {
      entry.dtype = tensor.dtype();
      entry.shape = tensor.shape();
      entry_of_tensor.push_back(file.entries.size());
      tensors.push_back({entry_name, tensor});
    }
    file.entries.push_back(std::move(entry));
  }
  const std::string path = folder + "/" + name;
  metadata.insert(metadata.begin(), {"format", "cairn"});
  const SafetensorsChecksums checksums = write_safetensors_with_checksums(path, tensors, metadata);
  file.header = checksums.header;
  for (std::size_t i = 0; i < entry_of_tensor.size(); ++i) {
    file.entries[entry_of_tensor[i]].checksum = checksums.tensors[i];
  }
  file.bytes = file_bytes(path);
  return file;
}

namespace {

// The entry's tensor, or nothing and what is wrong with it.
std::optional<Tensor> read_tensor(const SafetensorsReader& reader, const CheckpointEntry& entry,
                                  ReadBy by, std::string& damage) {
  const SafetensorsEntry* stored = reader.find(entry.name);
  if (stored == nullptr) {
    damage = core::str(entry.file, ": '", entry.name, "' is missing");
    return {};
  }
  if (stored->dtype != entry.dtype || !(stored->shape == entry.shape)) {
    damage = core::str(entry.file, ": '", entry.name, "' is ", stored->dtype, " ", stored->shape,
                       " instead of ", entry.dtype, " ", entry.shape);
    return {};
  }
  const Tensor tensor = by == ReadBy::map ? reader.map(*stored) : reader.read(*stored);
  if (checksum(tensor.raw_data(), tensor.nbytes()) != entry.checksum) {
    damage = core::str(entry.file, ": '", entry.name, "' ", entry.dtype, " ", entry.shape,
                       " is damaged: its checksum differs from the manifest's");
    return {};
  }
  return tensor;
}

void find_unlisted(const SafetensorsReader& reader, const ManifestFile& file,
                   std::vector<std::string>& damage) {
  std::vector<std::string_view> known;
  known.reserve(file.entries.size());
  for (const CheckpointEntry& entry : file.entries) known.emplace_back(entry.name);
  std::sort(known.begin(), known.end());
  for (const SafetensorsEntry& entry : reader.entries()) {
    if (!std::binary_search(known.begin(), known.end(), entry.name)) {
      damage.push_back(
          core::str(file.name, ": '", printable(entry.name), "' is not in the manifest"));
    }
  }
}

void read_entries(const SafetensorsReader& reader, const ManifestFile& file, ReadBy by,
                  FlatState& values, std::vector<std::string>& damage) {
  std::vector<std::optional<Tensor>> tensors(file.entries.size());
  std::vector<std::string> wrong(file.entries.size());
  on_threads(threads_for(file.bytes), file.entries.size(), [&](std::size_t i) {
    const CheckpointEntry& entry = file.entries[i];
    try {
      tensors[i] = entry.in_file() ? read_tensor(reader, entry, by, wrong[i]) : Tensor();
    } catch (const core::IoError& e) {
      if (by != ReadBy::salvage) throw;
      wrong[i] = core::str(entry.file, ": '", entry.name, "' is lost: ", e.what());
    }
  });
  values.reserve(values.size() + tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const CheckpointEntry& entry = file.entries[i];
    if (tensors[i]) values.emplace_back(entry.name, value_of(entry.kind, *tensors[i], entry.text));
    if (!tensors[i]) damage.push_back(wrong[i]);
  }
  find_unlisted(reader, file, damage);
}

}  // namespace

FlatState read_stored_file(const std::string& folder, const ManifestFile& file, ReadBy by,
                           std::vector<std::string>& damage) {
  FlatState values;
  try {
    const SafetensorsReader reader(folder + "/" + file.name);
    if (reader.file_bytes() != file.bytes) {
      damage.push_back(
          core::str(file.name, ": ", reader.file_bytes(), " bytes instead of ", file.bytes));
    }
    if (file.header && reader.header_checksum() != *file.header) {
      damage.push_back(core::str(
          file.name, ": its header is damaged: its checksum differs from the manifest's"));
    }
    read_entries(reader, file, by, values, damage);
  } catch (const core::DataError& e) {
    damage.push_back(e.what());
  } catch (const NoSuchFile& e) {
    damage.push_back(e.what());
  } catch (const core::IoError& e) {
    if (by != ReadBy::salvage) throw;
    damage.push_back(e.what());
  }
  return values;
}

}  // namespace cairn::checkpointing
