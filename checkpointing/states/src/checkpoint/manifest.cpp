#include "checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>

#include "cairn/core/error.h"
#include "cairn/core/version.h"
#include "checkpoint/shards.h"
#include "checkpoint/step_folder.h"
#include "formats/flat_state.h"
#include "formats/json_text.h"
#include "formats/safetensors/format.h"
#include "io/file_io.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "cairn-training-state";
// 1 had no lineage, 2 no shards: without any it is what is written, for older readers. A member
// that they may pass over (metric, libraries, header) keeps the number.
constexpr int kVersion = 3, kVersionWithoutShards = 2;
constexpr std::uint64_t kLargestManifest = 1'000'000'000;  // bytes

// "<what was expected>, got <what is there>", safe to show on a terminal; the file's name follows
// in parsing().
struct BadField : core::DataError {
  using core::DataError::DataError;
};

template <class... Args>
[[noreturn]] void fail_field(const Args&... args) {
  throw BadField(escaped(core::str(args...)));
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::uint64_t parse_hex(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc{} || end != text.data() + text.size() || text.size() != 16) {
    fail_field("a checksum of 16 hexadecimal digits, got '", printable(text), "'");
  }
  return value;
}

std::string quoted(const std::string& text) {
  return json_string(text, "save");
}

// Compact JSON, as nlohmann's dump() would write it of a tree that takes ten times as long to make.
void append_to(std::string& text, const CheckpointEntry& entry) {
  text += R"({"name":)" + quoted(entry.name) + R"(,"kind":")" + name(entry.kind) + '"';
  if (entry.kind == EntryKind::tensor) {
    text.append(R"(,"dtype":")").append(core::name(entry.dtype));
    text += R"(","shape":)" + json_sizes(entry.shape);
  }
  if (entry.shard) {
    text += R"(,"shard":{"whole":)" + json_sizes(entry.shard->whole) + R"(,"begin":)" +
            std::to_string(entry.shard->begin) + '}';
  }
  if (entry.in_file()) text += R"(,"xxh3":")" + hex(entry.checksum) + '"';
  if (entry.kind == EntryKind::text) text += R"(,"text":)" + quoted(entry.text);
  text += '}';
}

void append_to(std::string& text, const ManifestFile& file) {
  text += R"({"name":)" + quoted(file.name) + R"(,"bytes":)" + std::to_string(file.bytes);
  if (file.header) text += R"(,"header":")" + hex(*file.header) + '"';
  text += R"(,"entries":[)";
  for (std::size_t i = 0; i < file.entries.size(); ++i) {
    if (i > 0) text += ',';
    append_to(text, file.entries[i]);
  }
  text += "]}";
}

std::string dump(const Json& json) {
  try {
    return json.dump();
  } catch (const Json::exception& e) {
    core::fail("save", "expected names and text in UTF-8: ", e.what());
  }
}

// Whole and in range: nlohmann's own getter takes 1.5 for 1 and wraps what does not fit.
std::int64_t integer_in(const Json& value, const char* what, std::int64_t least,
                        std::int64_t largest) {
  const bool fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) &&
                    value.get<std::int64_t>() >= least && value.get<std::int64_t>() <= largest;
  if (!fits) {
    fail_field("an integer from ", least, " to ", largest, " as ", what, ", got ",
               printable(value.dump()));
  }
  return value.get<std::int64_t>();
}

std::int64_t integer_of(const Json& json, const char* key, std::int64_t least,
                        std::int64_t largest = INT64_MAX) {
  return integer_in(json.at(key), key, least, largest);
}

const std::string& text_of(const Json& json, const char* key) {
  return json.at(key).get_ref<const std::string&>();
}

const Json& list_of(const Json& json, const char* key) {
  const Json& value = json.at(key);
  if (!value.is_array()) fail_field("a list as ", key, ", got ", value.type_name());
  return value;
}

EntryKind parse_kind(const std::string& text) {
  for (const EntryKind kind : {EntryKind::tensor, EntryKind::number, EntryKind::integer,
                               EntryKind::text, EntryKind::dictionary}) {
    if (text == name(kind)) return kind;
  }
  fail_field("a kind of entry, got '", printable(text), "'");
}

Shape shape_of(const Json& entry, const char* key, const std::string& name) {
  const Json& sizes = list_of(entry, key);
  if (sizes.size() > static_cast<std::size_t>(core::kMaxDims)) {
    fail_field("at most ", core::kMaxDims, " sizes for '", name, "', got ", sizes.size());
  }
  Shape shape;
  for (const Json& size : sizes) shape.push_back(integer_in(size, "size", 0, INT64_MAX));
  return shape;
}

ShardPlace place_of(const Json& shard, const std::string& name) {
  return {shape_of(shard, "whole", name), integer_of(shard, "begin", 0)};
}

CheckpointEntry entry_of(const Json& json, const std::string& file) {
  CheckpointEntry entry;
  entry.name = text_of(json, "name");
  entry.file = file;
  entry.kind = parse_kind(text_of(json, "kind"));
  if (entry.kind == EntryKind::number) entry.dtype = DType::f64;
  if (entry.kind == EntryKind::integer) entry.dtype = DType::i64;
  if (entry.kind == EntryKind::text) entry.text = text_of(json, "text");
  if (entry.kind == EntryKind::tensor) {
    entry.dtype = core::parse_dtype(text_of(json, "dtype"));
    entry.shape = shape_of(json, "shape", entry.name);
    if (json.contains("shard")) entry.shard = place_of(json.at("shard"), entry.name);
  }
  if (entry.in_file()) entry.checksum = parse_hex(text_of(json, "xxh3"));
  return entry;
}

// Every entry lies in the file's bytes, which bounds shapes too.
void check_size(const CheckpointEntry& entry, std::uint64_t& left) {
  if (!entry.in_file()) return;
  std::uint64_t bytes = core::size_of(entry.dtype);
  bool fits = true;
  for (const std::int64_t size : entry.shape) {
    fits = fits && !__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes);
  }
  if (!fits || bytes > left) {
    fail_field("entries that fit the bytes of ", entry.file, ", got '", entry.name, "' ",
               entry.dtype, " ", entry.shape);
  }
  left -= bytes;
}

[[noreturn]] void fail_names(const ManifestFile& file, std::string_view name) {
  fail_field("distinct names of entries in ", file.name, ", got '", printable(name), "'");
}

ManifestFile file_of(const Json& json) {
  ManifestFile file;
  file.name = text_of(json, "name");
  file.bytes = static_cast<std::uint64_t>(integer_of(json, "bytes", 0));
  if (json.contains("header")) file.header = parse_hex(text_of(json, "header"));
  std::uint64_t left = file.bytes;
  const Json& entries = list_of(json, "entries");
  file.entries.reserve(entries.size());
  for (const Json& item : entries) {
    CheckpointEntry entry = entry_of(item, file.name);
    const bool of_a_rank = file.name == kStateFile && entry.name.starts_with(kRankPrefix);
    if (!usable_name(entry.name) || of_a_rank) fail_names(file, entry.name);
    const bool named_shard = file.name != kStateFile && entry.name.starts_with(kShardPrefix);
    if (entry.shard.has_value() != named_shard) {
      fail_field("shards, and nothing else, in a rank's file under ", kShardPrefix, ", got '",
                 printable(entry.name), "' in ", file.name);
    }
    check_size(entry, left);
    file.entries.push_back(std::move(entry));
  }
  std::vector<std::string_view> names;
  for (const CheckpointEntry& entry : file.entries) names.emplace_back(entry.name);
  const std::string_view twice = repeated_name(std::move(names));
  if (!twice.empty()) fail_names(file, twice);
  return file;
}

// The file of the parts and one a rank, each once, and no path to anywhere else.
void check_files(const Manifest& manifest) {
  std::set<std::string> missing = {kStateFile};
  if (manifest.files.size() != static_cast<std::size_t>(manifest.world_size) + 1) {
    fail_field("the files of ", manifest.world_size, " rank(s), got ", manifest.files.size());
  }
  for (int rank = 0; rank < manifest.world_size; ++rank) missing.insert(rank_file(rank));
  for (const ManifestFile& file : manifest.files) {
    if (missing.erase(file.name) == 1) continue;
    fail_field("the files of ", manifest.world_size, " rank(s), each once, got '",
               printable(file.name), "'");
  }
}

// What is cut is there once, whole.
void check_shards(const std::vector<ManifestFile>& files) {
  std::string problems;
  const std::vector<ShardedTensor> sharded = sharded_tensors(files, problems);
  if (sharded.empty()) return;
  std::set<std::string> shared;
  for (const ManifestFile& file : files) {
    if (file.name != kStateFile) continue;
    for (const CheckpointEntry& entry : file.entries) shared.insert(entry.name);
  }
  for (const ShardedTensor& tensor : sharded) {
    if (shared.contains(tensor.name)) {
      problems += core::str("\n  '", tensor.name, "': in shards and in ", kStateFile);
    }
  }
  if (problems.empty()) return;
  throw BadField(
      core::str("shards that make up each tensor, every element once, got:", problems, "\n "));
}

Json json_of(const Lineage& lineage) {
  Json continues = Json::array();
  for (const std::uint64_t id : lineage.continues) continues.push_back(hex(id));
  return {{"step", lineage.step}, {"save", lineage.save}, {"continues", std::move(continues)}};
}

Lineage lineage_of(const Json& json) {
  Lineage lineage;
  lineage.step = integer_of(json, "step", 0);
  lineage.save = integer_of(json, "save", 1, INT64_MAX - 1);
  const Json& continues = list_of(json, "continues");
  if (continues.size() > kLongestLine) {
    fail_field("at most ", kLongestLine, " saves that this one continues, got ", continues.size());
  }
  for (const Json& id : continues) lineage.continues.push_back(parse_hex(id.get<std::string>()));
  return lineage;
}

// Calls f, turning what nlohmann's accessors and the parsers throw into a DataError that names the
// file.
template <class F>
auto parsing(const std::string& path, F&& f) {
  try {
    return f();
  } catch (const Json::exception& e) {
    core::fail<core::DataError>("manifest", "expected a manifest in '", path,
                                "', got: ", escaped(e.what()));
  } catch (const core::InvalidArgument& e) {
    core::fail<core::DataError>("manifest", "expected a manifest in '", path,
                                "', got: ", escaped(e.what()));
  } catch (const BadField& e) {
    core::fail<core::DataError>("manifest", "expected ", e.what(), " in '", path, "'");
  }
}

LibraryVersions libraries_of(const Json& json) {
  LibraryVersions libraries;
  const auto found = json.find("libraries");
  if (found == json.end()) return libraries;
  for (const auto& [library, version] : found->items()) {
    libraries.emplace_back(library, version.get<std::string>());
  }
  return libraries;
}

std::optional<double> metric_of(const Json& json) {
  if (!json.contains("metric")) return {};
  const Json& metric = json.at("metric");
  if (!metric.is_number()) fail_field("a number as metric, got ", printable(metric.dump()));
  return metric.get<double>();
}

// " by Cairn 0.2.0", where the manifest of another version tells.
std::string writer_of(const Json& json) {
  const auto found = json.find("libraries");
  if (found == json.end() || !found->is_object()) return "";
  const auto cairn = found->find("cairn");
  if (cairn == found->end() || !cairn->is_string()) return "";
  return core::str(" by Cairn ", printable(cairn->get<std::string>()));
}

// Returns the version.
std::int64_t check_format(const Json& json, const std::string& path) {
  if (!json.is_object() || json.value("format", "") != kFormat) {
    core::fail<core::DataError>("manifest", "expected the format ", kFormat, " in '", path,
                                "', got another");
  }
  const std::int64_t version = integer_of(json, "version", INT64_MIN);
  if (version < 1 || version > kVersion) {
    core::fail<core::DataError>("manifest", "expected version 1 to ", kVersion, " in '", path,
                                "', got ", version, " (written", writer_of(json),
                                ", a newer release than this one, ", CAIRN_VERSION, ")");
  }
  return version;
}

// All but the files.
void read_head(const Json& json, const std::string& path, Manifest& manifest) {
  parsing(path, [&] {
    if (check_format(json, path) == 1) {
      manifest.lineage.step = integer_of(json, "step", 0);
    } else {
      manifest.lineage = lineage_of(json);
    }
    manifest.world_size = static_cast<int>(integer_of(json, "world_size", 1, INT32_MAX));
    manifest.metric = metric_of(json);
    manifest.libraries = libraries_of(json);
  });
}

// One past the end of the string that begins at `at`.
std::size_t end_of_string(const std::string& text, std::size_t at) {
  while (++at < text.size() && text[at] != '"') at += text[at] == '\\' ? 1 : 0;
  return std::min(at + 1, text.size());
}

// Outside of strings.
std::string without_spaces(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const std::size_t end = c == '"' ? end_of_string(text, i) : i + 1;
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') out.append(text, i, end - i);
    i = end;
  }
  return out;
}

// The text of a manifest that is as manifest_text writes it, white space aside, without the
// checksum at its end, and that.
struct OwnText {
  std::string body;
  std::uint64_t checksum = 0;
};

// Of other manifests, and of damaged ones, nothing.
std::optional<OwnText> own_text(const std::string& text) {
  OwnText own{without_spaces(text)};
  const std::size_t end = own.body.rfind(R"(,"checksum":)");
  if (end == std::string::npos) return {};
  const std::string last = own.body.substr(end);
  own.body.resize(end);
  own.body += '}';
  own.checksum = checksum(own.body.data(), own.body.size());
  if (last != core::str(R"(,"checksum":")", hex(own.checksum), R"("})")) return {};
  return own;
}

// Takes it out: it is that of all the rest.
std::uint64_t check_checksum(Json& json, const std::string& text, const std::string& path) {
  if (const std::optional<OwnText> own = own_text(text)) return own->checksum;
  const std::string stored = json.value("checksum", "");
  json.erase("checksum");
  const std::string body = dump(json);
  const std::uint64_t actual = checksum(body.data(), body.size());
  if (stored != hex(actual)) {
    core::fail<core::DataError>("manifest", "expected the checksum ", printable(stored), " of '",
                                path, "', got another: the manifest is damaged");
  }
  return actual;
}

}  // namespace

namespace {

int version_of(const Manifest& manifest) {
  const auto is_shard = [](const CheckpointEntry& entry) { return entry.shard.has_value(); };
  const bool shards =
      std::any_of(manifest.files.begin(), manifest.files.end(), [&](const ManifestFile& file) {
        return std::any_of(file.entries.begin(), file.entries.end(), is_shard);
      });
  return shards ? kVersion : kVersionWithoutShards;
}

}  // namespace

ManifestText manifest_text(const Manifest& manifest, const std::string& path) {
  parsing(path, [&] {
    check_files(manifest);
    check_shards(manifest.files);
  });
  Json json = {{"format", kFormat}, {"version", version_of(manifest)}};
  json.update(json_of(manifest.lineage));
  json["world_size"] = manifest.world_size;
  if (manifest.metric) json["metric"] = *manifest.metric;
  for (const auto& [library, version] : manifest.libraries) json["libraries"][library] = version;
  std::string body = dump(json);
  body.back() = ',';
  body += R"("files":[)";
  for (const ManifestFile& file : manifest.files) {
    if (body.back() != '[') body += ',';
    append_to(body, file);
  }
  body += "]}";
  ManifestText written;
  written.checksum = checksum(body.data(), body.size());
  body.back() = ',';
  body += R"("checksum":")" + hex(written.checksum) + "\"}";
  written.text = json_in_lines(body) + "\n";
  if (written.text.size() <= kLargestManifest) return written;
  core::fail<core::DataError>("manifest", "expected at most ", kLargestManifest, " bytes in '",
                              path, "', got ", written.text.size(), " (too many entries)");
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  Json json = parse_json(text, "manifest", path);
  return parsing(path, [&] {
    check_format(json, path);
    Manifest manifest;
    manifest.checksum = check_checksum(json, text, path);
    read_head(json, path, manifest);
    for (const Json& file : list_of(json, "files")) manifest.files.push_back(file_of(file));
    check_files(manifest);
    check_shards(manifest.files);
    return manifest;
  });
}

namespace {

std::optional<Manifest> parse_own_head(const std::string& text, const std::string& path) {
  std::optional<OwnText> own = own_text(text);
  const std::size_t files = own ? own->body.find(R"(,"files":)") : std::string::npos;
  if (files == std::string::npos) return {};
  Manifest manifest;
  manifest.checksum = own->checksum;
  own->body.resize(files);
  own->body += '}';
  try {
    read_head(parse_json(own->body, "manifest", path), path, manifest);
  } catch (const core::DataError&) {
    return {};
  }
  return manifest;
}

std::string text_of_manifest(const std::string& path) {
  if (file_bytes(path) <= kLargestManifest) return read_text(path);
  core::fail<core::DataError>("manifest", "expected at most ", kLargestManifest, " bytes in '",
                              path, "', got more");
}

void check_name(const Manifest& manifest, const std::string& folder) {
  const std::string name = std::filesystem::path(folder).filename().string();
  const std::int64_t step = std::max(step_of_folder(name), step_of_hidden(name, kReplaced));
  if (step >= 0 && step != manifest.lineage.step) {
    core::fail<core::DataError>("manifest", "expected step ", step, " in '", folder, "/",
                                kManifestName, "', got ", manifest.lineage.step,
                                " (was the folder renamed?)");
  }
}

}  // namespace

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  Manifest manifest = parse_manifest(text_of_manifest(path), path);
  check_name(manifest, folder);
  return manifest;
}

Manifest parse_manifest_head(const std::string& text, const std::string& path) {
  if (std::optional<Manifest> head = parse_own_head(text, path)) return std::move(*head);
  Manifest manifest = parse_manifest(text, path);
  manifest.files.clear();
  return manifest;
}

Manifest read_manifest_head(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  Manifest manifest = parse_manifest_head(text_of_manifest(path), path);
  check_name(manifest, folder);
  return manifest;
}

std::string lineage_text(const Lineage& lineage) {
  return dump(json_of(lineage));
}

Lineage parse_lineage(const std::string& text, const std::string& path) {
  const Json json = parse_json(text, "lineage", path);
  return parsing(path, [&] { return lineage_of(json); });
}

std::string manifest_file_text(const ManifestFile& file) {
  std::string text;
  append_to(text, file);
  return text;
}

ManifestFile parse_manifest_file(const std::string& text, const std::string& path) {
  const Json json = parse_json(text, "manifest", path);
  return parsing(path, [&] { return file_of(json); });
}

}  // namespace cairn::checkpointing
