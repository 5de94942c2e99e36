#include "manifest.h"

#include <charconv>
#include <cstdio>

#include "cairn/core/error.h"
#include "json_text.h"
#include "safetensors_format.h"

namespace cairn::checkpointing {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "cairn-training-state";
constexpr int kVersion = 1;
constexpr int kCompact = -1, kIndented = 1;  // nlohmann's indents

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::uint64_t parse_hex(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc{} || end != text.data() + text.size() || text.size() != 16) {
    core::fail<core::DataError>("manifest", "expected a checksum of 16 hexadecimal digits, got '",
                                text, "'");
  }
  return value;
}

Json json_of(const CheckpointEntry& entry) {
  Json json = {{"name", entry.name}, {"kind", name(entry.kind)}};
  switch (entry.kind) {
    case EntryKind::tensor:
      json["dtype"] = core::name(entry.dtype);
      json["shape"] = std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end());
      [[fallthrough]];
    case EntryKind::number:
    case EntryKind::integer:
      json["xxh3"] = hex(entry.checksum);
      break;
    case EntryKind::text:
      json["text"] = entry.text;
      break;
    case EntryKind::dictionary:
      break;
  }
  return json;
}

Json json_of(const ManifestFile& file) {
  Json entries = Json::array();
  for (const CheckpointEntry& entry : file.entries) entries.push_back(json_of(entry));
  return {{"name", file.name}, {"bytes", file.bytes}, {"entries", std::move(entries)}};
}

std::string dump(const Json& json, int indent) {
  try {
    return json.dump(indent);
  } catch (const Json::exception& e) {
    core::fail("save", "expected names and text in UTF-8: ", e.what());
  }
}

EntryKind parse_kind(const std::string& text) {
  for (const EntryKind kind : {EntryKind::tensor, EntryKind::number, EntryKind::integer,
                               EntryKind::text, EntryKind::dictionary}) {
    if (text == name(kind)) return kind;
  }
  core::fail<core::DataError>("manifest", "expected a kind of entry, got '", text, "'");
}

CheckpointEntry entry_of(const Json& json, const std::string& file) {
  CheckpointEntry entry;
  entry.name = json.at("name").get<std::string>();
  entry.file = file;
  entry.kind = parse_kind(json.at("kind").get<std::string>());
  if (entry.kind == EntryKind::number) entry.dtype = DType::f64;
  if (entry.kind == EntryKind::integer) entry.dtype = DType::i64;
  if (entry.kind == EntryKind::text) entry.text = json.at("text").get<std::string>();
  if (entry.kind == EntryKind::tensor) {
    entry.dtype = core::parse_dtype(json.at("dtype").get<std::string>());
    for (const Json& size : json.at("shape")) entry.shape.push_back(size.get<std::int64_t>());
  }
  if (json.contains("xxh3")) entry.checksum = parse_hex(json.at("xxh3").get<std::string>());
  return entry;
}

ManifestFile file_of(const Json& json) {
  ManifestFile file;
  file.name = json.at("name").get<std::string>();
  file.bytes = json.at("bytes").get<std::uint64_t>();
  for (const Json& entry : json.at("entries")) file.entries.push_back(entry_of(entry, file.name));
  return file;
}

// Calls f, turning what nlohmann's accessors and the parsers throw into a DataError that names the
// file.
template <class F>
auto parsing(const std::string& path, F&& f) {
  try {
    return f();
  } catch (const Json::exception& e) {
    core::fail<core::DataError>("manifest", "expected a manifest in '", path, "', got: ", e.what());
  } catch (const core::InvalidArgument& e) {
    core::fail<core::DataError>("manifest", "expected a manifest in '", path, "', got: ", e.what());
  }
}

void check_format(const Json& json, const std::string& path) {
  if (!json.is_object() || json.value("format", "") != kFormat) {
    core::fail<core::DataError>("manifest", "expected the format ", kFormat, " in '", path,
                                "', got another");
  }
  const int version = json.value("version", 0);
  if (version != kVersion) {
    core::fail<core::DataError>("manifest", "expected version ", kVersion, " in '", path, "', got ",
                                version, " (written by another release of Cairn)");
  }
}

void check_checksum(Json json, const std::string& path) {
  const std::string stored = json.value("checksum", "");
  json.erase("checksum");
  const std::string body = dump(json, kCompact);
  if (stored != hex(checksum(body.data(), body.size()))) {
    core::fail<core::DataError>("manifest", "expected the checksum ", stored, " of '", path,
                                "', got another: the manifest is damaged");
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  Json files = Json::array();
  for (const ManifestFile& file : manifest.files) files.push_back(json_of(file));
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"step", manifest.step},
               {"world_size", manifest.world_size},
               {"files", std::move(files)}};
  const std::string body = dump(json, kCompact);
  json["checksum"] = hex(checksum(body.data(), body.size()));
  return dump(json, kIndented) + "\n";
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  const Json json = parse_json(text, "manifest", path);
  return parsing(path, [&] {
    check_format(json, path);
    check_checksum(json, path);
    Manifest manifest;
    manifest.step = json.at("step").get<std::int64_t>();
    manifest.world_size = json.at("world_size").get<int>();
    for (const Json& file : json.at("files")) manifest.files.push_back(file_of(file));
    return manifest;
  });
}

std::string manifest_file_text(const ManifestFile& file) {
  return dump(json_of(file), kCompact);
}

ManifestFile parse_manifest_file(const std::string& text, const std::string& path) {
  const Json json = parse_json(text, "manifest", path);
  return parsing(path, [&] { return file_of(json); });
}

}  // namespace cairn::checkpointing
