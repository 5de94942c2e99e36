#include "targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "byte_pairs.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "checkpoint/manifest.h"
#include "checkpointing/temporary_folder.h"
#include "formats/safetensors/format.h"
#include "formats/torch/archive.h"
#include "formats/zip/reader.h"
#include "formats/zip/writer.h"
#include "picture.h"
#include "support/test_folder.h"

namespace cairn::fuzz {

namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

const fs::path kTests = test::test_folder();

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

/// Whether f met none.
template <class F>
bool tolerating_data_errors(F&& f) {
  try {
    f();
    return true;
  } catch (const core::DataError&) {
    return false;
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

bool read_zip(std::string_view bytes) {
  const MemoryFile file(bytes);
  const auto is_read = [&](bool verify) {
    return tolerating_data_errors(
        [&] { read_all(checkpointing::read_torch(file.path(), {verify})); });
  };
  const bool any = is_read(false);
  return is_read(true) && any;
}

bool read_pickle(std::string_view bytes) {
  const MemoryFile file("");
  checkpointing::ZipWriter zip(file.path());
  zip.add("x/data.pkl", bytes);
  for (int i = 0; i < 4; ++i) zip.add("x/data/" + std::to_string(i), std::string(256, '\1'));
  zip.close();
  return tolerating_data_errors([&] { read_all(checkpointing::read_torch(file.path())); });
}

// ---- Folders, of which one file or two are fed

/// Links to the files of another folder, and to those that are fed.
class LinkedFolder {
 public:
  explicit LinkedFolder(const fs::path& like) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::absolute(like))) {
      const fs::path to = folder_ / entry.path().lexically_relative(fs::absolute(like)).string();
      entry.is_directory() ? (void)fs::create_directory(to) : fs::create_symlink(entry.path(), to);
    }
  }
  StateDict read(StateDict (*reader)(const std::string&, const checkpointing::TorchReadOptions&),
                 const std::vector<std::pair<std::string, const MemoryFile*>>& files) const {
    for (const auto& [name, file] : files) {
      fs::remove(folder_ / name);
      fs::create_symlink(file->path(), folder_ / name);
    }
    return reader(folder_.string(), {.verify = false});
  }

 private:
  checkpointing::TemporaryFolder folder_;
};

/// Files that a folder names may be missing.
template <class F>
bool tolerating_missing_files(F&& f) {
  try {
    return tolerating_data_errors(f);
  } catch (const core::IoError&) {
    return false;
  }
}

bool read_distributed(std::string_view bytes) {
  static const LinkedFolder folder(kTests / "golden/torch_distributed");
  const MemoryFile metadata(bytes);
  return tolerating_missing_files([&] {
    read_all(folder.read(checkpointing::read_torch_distributed,
                         {{checkpointing::kDistributedMetadata, &metadata}}));
  });
}

/// An archive of torch.save's as a golden one, with another pickle.
class PickleInArchive {
 public:
  explicit PickleInArchive(const fs::path& path) {
    const std::string bytes = read_file(path);
    const checkpointing::ZipReader zip(bytes, path.string());
    for (const auto& entry : zip.entries()) {
      const bool is_pickle = entry.name.ends_with("/data.pkl");
      (is_pickle ? pickle_ : others_).emplace_back(entry.name, zip.bytes_of(entry));
    }
  }
  const std::string& golden() const { return pickle_.at(0).second; }
  void write(const MemoryFile& to, std::string_view pickle) const {
    checkpointing::ZipWriter zip(to.path());
    zip.add(pickle_.at(0).first, pickle);
    for (const auto& [name, bytes] : others_) zip.add(name, bytes);
    zip.close();
  }

 private:
  std::vector<std::pair<std::string, std::string>> pickle_, others_;
};

/// A universal checkpoint whose model states and optimizer's state are fed.
struct Universal {
  Universal(const char* name, const char* states)
      : path(kTests / "golden/deepspeed_universal" / name / "steps_universal"),
        folder(path),
        model_name(states),
        model(path / states),
        optimizer(path / checkpointing::kUniversalOptimizer) {}

  fs::path path;
  LinkedFolder folder;
  std::string model_name;
  PickleInArchive model, optimizer;
};

const Universal& universal(bool stage_3) {
  static const Universal all[] = {{"stage2", "mp_rank_00_model_states.pt"},
                                  {"stage3_f16", "zero_pp_rank_0_mp_rank_00_model_states.pt"}};
  return all[stage_3 ? 1 : 0];
}

/// The stage, the length of the first pickle in two bytes, and the two pickles.
bool read_deepspeed(std::string_view bytes) {
  if (bytes.size() < 3) return false;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const Universal& like = universal(byte(0) % 2 == 1);
  const std::size_t length = byte(1) + 256U * byte(2);
  const std::string_view pickles = bytes.substr(3), first = pickles.substr(0, length);
  const MemoryFile model(""), optimizer("");
  like.model.write(model, first);
  like.optimizer.write(optimizer, pickles.substr(first.size()));
  return tolerating_missing_files([&] {
    read_all(like.folder.read(
        checkpointing::read_deepspeed_universal,
        {{like.model_name, &model}, {checkpointing::kUniversalOptimizer, &optimizer}}));
  });
}

bool read_safetensors(std::string_view bytes) {
  const MemoryFile file(bytes);
  return tolerating_data_errors([&] {
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

bool read_manifest(std::string_view bytes) {
  const std::string text(bytes);
  const bool any = tolerating_data_errors([&] { checkpointing::parse_manifest(text, "fuzz"); });
  tolerating_data_errors([&] { checkpointing::parse_lineage(text, "fuzz"); });
  tolerating_data_errors([&] { checkpointing::parse_manifest_file(text, "fuzz"); });
  if (text.size() > 100'000) return any;
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
  return any;
}

bool read_picture(std::string_view bytes) {
  const MemoryFile file(bytes);
  return tolerating_data_errors([&] {
    const data::detail::EncodedPicture encoded(file.path());
    for (int reduction = 1; reduction <= (encoded.reduces() ? 8 : 1); reduction *= 2) {
      const data::detail::Picture picture = encoded.decode(reduction);
      const auto pixels = static_cast<std::size_t>(picture.height * picture.width);
      if (picture.rgb.size() != 3 * pixels) std::abort();
    }
  });
}

/// What is taken for a tokenizer gives back the text that it cut.
bool read_tokenizer(std::string_view bytes) {
  const MemoryFile file(bytes);
  return tolerating_data_errors([&] {
    const auto pairs = data::detail::BytePairs::from_file(file.path());
    constexpr std::string_view kText = "It's 12 caf\u00e9s, <|end|> and\n\n more ";
    std::string text;
    for (const std::int32_t token : pairs.encode(kText))
      text += pairs.symbols().at(static_cast<std::size_t>(token));
    if (text != kText && text != " " + std::string(kText)) std::abort();
  });
}

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

std::vector<std::string> distributed_seeds() {
  std::vector<std::string> seeds = corpus("distributed");
  for (const char* name : {"overlap.metadata", ".metadata"})
    seeds.push_back(read_file(kTests / "golden/torch_distributed" / name));
  return seeds;
}

std::vector<std::string> deepspeed_seeds() {
  std::vector<std::string> seeds = corpus("deepspeed");
  for (const bool stage_3 : {false, true}) {
    const Universal& one = universal(stage_3);
    const std::size_t length = one.model.golden().size();
    const std::string head{static_cast<char>(stage_3), static_cast<char>(length % 256),
                           static_cast<char>(length / 256)};
    seeds.push_back(head + one.model.golden() + one.optimizer.golden());
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

std::vector<std::string> picture_seeds() {
  std::vector<std::string> seeds = corpus("picture");
  for (const char* name : {"colour.jpg", "grey.jpg", "inks.jpg", "palette.png", "see_through.png"})
    seeds.push_back(read_file(kTests / "data/golden/pictures" / name));
  return seeds;
}

std::vector<std::string> tokenizer_seeds() {
  std::vector<std::string> seeds = corpus("tokenizer");
  seeds.push_back(read_file(kTests / "data/golden/tokenizer.json"));
  return seeds;
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {{"zip", read_zip, zip_seeds},
                                          {"pickle", read_pickle, pickle_seeds},
                                          {"distributed", read_distributed, distributed_seeds},
                                          {"deepspeed", read_deepspeed, deepspeed_seeds},
                                          {"safetensors", read_safetensors, safetensors_seeds},
                                          {"manifest", read_manifest, manifest_seeds},
                                          {"picture", read_picture, picture_seeds},
                                          {"tokenizer", read_tokenizer, tokenizer_seeds}};
  return all;
}

const Target& target(std::string_view name) {
  for (const Target& one : targets()) {
    if (one.name == name) return one;
  }
  throw std::out_of_range("no such target");
}

}  // namespace cairn::fuzz
