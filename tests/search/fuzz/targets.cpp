#include "targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "checkpoint/manifest.h"
#include "formats/safetensors/format.h"
#include "formats/zip/reader.h"
#include "formats/zip/writer.h"
#include "support/test_folder.h"

namespace cairn::fuzz {

namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

/// A file in memory, under a path that readers open.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : descriptor_(memfd_create("fuzz", 0)) {
    if (write(descriptor_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
      throw std::runtime_error("memfd");
    }
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

template <class F>
void tolerating_data_errors(F&& f) {
  try {
    f();
  } catch (const core::DataError&) {
  }
}

/// Touches every element, as whoever asked for the tensor will.
void read_tensor(const Tensor& x) {
  volatile double sum = 0;
  for (const double element : x.to_vector()) sum = sum + element;
}

void read_all(const StateDict& state) {
  for (const auto& [name, value] : checkpointing::flatten(state)) {
    if (const auto* x = std::get_if<Tensor>(&value)) read_tensor(*x);
  }
}

void read_zip(std::string_view bytes) {
  const MemoryFile file(bytes);
  for (const bool verify : {false, true}) {
    tolerating_data_errors([&] { read_all(checkpointing::read_torch(file.path(), {verify})); });
  }
}

void read_pickle(std::string_view bytes) {
  const MemoryFile file("");
  checkpointing::ZipWriter zip(file.path());
  zip.add("x/data.pkl", bytes);
  for (int i = 0; i < 4; ++i) zip.add("x/data/" + std::to_string(i), std::string(256, '\1'));
  zip.close();
  tolerating_data_errors([&] { read_all(checkpointing::read_torch(file.path())); });
}

void read_safetensors(std::string_view bytes) {
  const MemoryFile file(bytes);
  tolerating_data_errors([&] {
    const checkpointing::SafetensorsReader reader(file.path());
    for (const auto& entry : reader.entries()) read_tensor(reader.read(entry));
  });
}

/// The manifest with a checksum that is right: mutations would stop at it otherwise.
std::string signed_again(std::string_view text) {
  const ordered_json json = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::string(text);
  ordered_json body = json;
  body.erase("checksum");
  const std::string dumped = body.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  char hex[17];
  std::snprintf(
      hex, sizeof hex, "%016llx",
      static_cast<unsigned long long>(checkpointing::checksum(dumped.data(), dumped.size())));
  body["checksum"] = hex;
  return body.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

void read_manifest(std::string_view bytes) {
  const std::string text(bytes);
  tolerating_data_errors([&] { checkpointing::parse_manifest(text, "fuzz"); });
  tolerating_data_errors([&] { checkpointing::parse_lineage(text, "fuzz"); });
  tolerating_data_errors([&] { checkpointing::parse_manifest_file(text, "fuzz"); });
  if (text.size() > 100'000) return;
  const std::string again = signed_again(bytes);
  tolerating_data_errors([&] {
    const checkpointing::Manifest all = checkpointing::parse_manifest(again, "fuzz");
    const auto head = checkpointing::parse_manifest_head(again, "fuzz");
    if (head.checksum != all.checksum || head.lineage.step != all.lineage.step ||
        head.lineage.continues != all.lineage.continues || head.metric != all.metric) {
      std::abort();  // read with the files or without, a head is the same
    }
    const auto written = checkpointing::manifest_text(all, "fuzz");
    checkpointing::parse_manifest(written.text, "fuzz");  // what is read can be written and read
  });
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

const fs::path kTests = test::test_folder();

std::vector<std::string> corpus(const char* name) {
  std::vector<std::string> files;
  const fs::path folder = kTests / "search/fuzz/corpus" / name;
  if (!fs::exists(folder)) return files;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) files.push_back(read_file(path));
  return files;
}

std::vector<std::string> zip_seeds() {
  std::vector<std::string> seeds = corpus("zip");
  for (const char* name : {"torch_values", "torch_protocol4", "torch_sgd"}) {
    seeds.push_back(read_file(kTests / "golden" / (std::string(name) + ".pt")));
  }
  return seeds;
}

std::vector<std::string> pickle_seeds() {
  std::vector<std::string> seeds = corpus("pickle");
  for (const std::string& file : zip_seeds()) {
    try {
      const checkpointing::ZipReader zip(file, "seed");
      for (const auto& entry : zip.entries()) {
        if (entry.name.ends_with("/data.pkl")) seeds.emplace_back(zip.bytes_of(entry));
      }
    } catch (const core::DataError&) {
    }
  }
  return seeds;
}

std::vector<std::string> safetensors_seeds() {
  std::vector<std::string> seeds = corpus("safetensors");
  seeds.push_back(read_file(kTests / "checkpointing/data/golden.safetensors"));
  seeds.push_back(
      read_file(kTests / "checkpointing/data/version_1/step-00001000/state.safetensors"));
  return seeds;
}

std::vector<std::string> manifest_seeds() {
  std::vector<std::string> seeds = corpus("manifest");
  seeds.push_back(read_file(kTests / "checkpointing/data/version_1/step-00001000/manifest.json"));
  return seeds;
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {{"zip", read_zip, zip_seeds},
                                          {"pickle", read_pickle, pickle_seeds},
                                          {"safetensors", read_safetensors, safetensors_seeds},
                                          {"manifest", read_manifest, manifest_seeds}};
  return all;
}

const Target& target(std::string_view name) {
  for (const Target& one : targets()) {
    if (one.name == name) return one;
  }
  throw std::out_of_range("no such target");
}

}  // namespace cairn::fuzz
