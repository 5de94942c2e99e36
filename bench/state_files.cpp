// Saves and loads states of so many MiB, for scripts/bench_checkpointing: 24 blocks of four
// matrices each, as a language model has them. Prints one JSON line, times in milliseconds.
//
//   state_files save FOLDER MIB ROUNDS    saves, and dd with fsync of the same bytes, by turns
//   state_files async FOLDER MIB ROUNDS   what a background save blocks; a save, memcpy: by turns
//   state_files load FILE ROUNDS          the tensors of a .safetensors file, in memory
//   state_files load_torch FILE ROUNDS    those of a .pt file, without checksums (torch.load's way)
//   state_files entries FOLDER N          saves, verifies and resumes a state of N scalars
//   state_files hostile FOLDER            refuses headers of 2.6 MB made to take long; the slowest
//   state_files files FOLDER MIB          makes state.safetensors and state.pt for the two
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"

namespace {

using namespace cairn;
namespace fs = std::filesystem;

NamedTensors weights(std::int64_t mib) {
  constexpr std::int64_t kBlocks = 24,
                         kWidthRatios = 1 + 3 + 4 + 4;  // projection, q k v, two of the MLP
  const std::int64_t elements = (mib << 20) / 4 / kBlocks / kWidthRatios;
  NamedTensors all;
  std::uint32_t bits = 1;
  for (std::int64_t block = 0; block < kBlocks; ++block) {
    for (const auto& [name, ratio] :
         {std::pair("project", 1), {"qkv", 3}, {"up", 4}, {"down", 4}}) {
      Tensor x = Tensor::empty({ratio, elements}, DType::f32, Device{});
      float* values = x.data<float>();
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        bits = bits * 1664525 + 1013904223;
        values[i] = static_cast<float>(bits >> 8) * 0x1p-24f - 0.5f;
      }
      all.push_back({core::str("block.", block, ".", name), x});
    }
  }
  return all;
}

double milliseconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

using Times = std::vector<double>;

// What one side leaves to the disk, like the blocks of a file that was removed, is not the other's.
double milliseconds_on_a_still_disk(const std::function<void()>& work) {
  ::sync();
  return milliseconds_of(work);
}

nlohmann::json save(const std::string& folder, std::int64_t mib, int rounds) {
  checkpointing::Tensors part(weights(mib));
  checkpointing::TrainingState state({{"model", part}}, {}, {.keep = rounds + 1});
  const std::string copy = folder + "/copy";
  Times cairn, peer;
  state.save(folder, 1);
  for (int i = 0; i < rounds; ++i) {
    std::string path;
    cairn.push_back(milliseconds_on_a_still_disk([&] { path = state.save(folder, i + 2); }));
    const std::string dd =
        "dd bs=1M conv=fsync status=none if='" + path + "/state.safetensors' of='" + copy + "'";
    peer.push_back(milliseconds_on_a_still_disk([&] {
      if (std::system(dd.c_str()) != 0)
        core::fail<core::IoError>("bench", "expected dd to copy, got an error");
    }));
    fs::remove(copy);
  }
  return {{"ms", cairn}, {"peer_ms", peer}};
}

// The ceiling of a snapshot: memcpy of large pieces, one a core, in memory that was used before.
class HostCopy {
 public:
  explicit HostCopy(std::size_t bytes) : from_(bytes, 'x'), to_(bytes) {}

  void operator()() {
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t piece = from_.size() / cores;
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < cores; ++i) {
      threads.emplace_back(
          [=, this] { std::memcpy(to_.data() + i * piece, from_.data() + i * piece, piece); });
    }
  }

 private:
  std::vector<char> from_, to_;
};

nlohmann::json asynchronous(const std::string& folder, std::int64_t mib, int rounds) {
  checkpointing::Tensors part(weights(mib));
  checkpointing::TrainingState state({{"model", part}}, {}, {.keep = 2 * rounds + 1});
  state.save_async(folder, 1);
  state.finish();
  HostCopy copy(static_cast<std::size_t>(mib) << 20);
  Times blocked, plain, copied;
  for (int i = 0; i < rounds; ++i) {
    plain.push_back(milliseconds_on_a_still_disk([&] { state.save(folder, 2 * i + 2); }));
    blocked.push_back(milliseconds_on_a_still_disk([&] { state.save_async(folder, 2 * i + 3); }));
    state.finish();
    copied.push_back(milliseconds_on_a_still_disk([&] { copy(); }));
  }
  return {{"ms", blocked}, {"peer_ms", plain}, {"copy_ms", copied}};
}

// A byte of every page: what is mapped lazily is read here.
std::size_t touch(const StateDict& state) {
  std::size_t sum = 0;
  for (const auto& [name, value] : checkpointing::flatten(state)) {
    const auto& x = std::get<Tensor>(value);
    const auto* bytes = static_cast<const unsigned char*>(x.raw_data());
    for (std::size_t i = 0; i < x.nbytes(); i += 4096) sum += bytes[i];
  }
  return sum;
}

nlohmann::json load(int rounds, const std::function<StateDict()>& read) {
  Times times;
  volatile std::size_t sum = touch(read());
  for (int i = 0; i < rounds; ++i) {
    times.push_back(milliseconds_of([&] { sum = sum + touch(read()); }));
  }
  return {{"ms", times}};
}

nlohmann::json entries(const std::string& folder, int count) {
  NamedTensors all;
  for (int i = 0; i < count; ++i)
    all.push_back({core::str("layer.", i / 10, ".weight", i % 10), Tensor::full({1}, i)});
  checkpointing::Tensors part(all);
  checkpointing::TrainingState state({{"model", part}});
  std::string path;
  nlohmann::json found;
  const auto time = [&](const std::string& what, const std::function<void()>& work) {
    const std::clock_t begin = std::clock();
    found[what + "_ms"] = milliseconds_of(work);
    found[what + "_processor_ms"] =
        1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  time("save", [&] { path = state.save(folder, 1); });
  time("verify", [&] {
    if (!checkpointing::find_damage(path).empty()) core::fail("bench", "expected a good file");
  });
  time("resume", [&] { state.resume_latest(folder); });
  return found;
}

std::string repeated(const std::string& part, std::size_t bytes) {
  std::string text;
  while (text.size() + part.size() <= bytes) text += part;
  return text;
}

// Of the processor, for a .safetensors file with this header and no data.
double milliseconds_to_refuse(const std::string& path, std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const auto bytes = static_cast<std::uint64_t>(header.size());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) << header;
  file.close();
  const std::clock_t begin = std::clock();
  try {
    const checkpointing::SafetensorsReader reader(path);
  } catch (const core::DataError&) {
    return 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  }
  core::fail("bench", "expected a refusal of '", header.substr(0, 40), "...'");
}

nlohmann::json hostile(const std::string& folder) {
  constexpr std::size_t kBytes = 2'600'000;
  const std::string path = folder + "/hostile.safetensors";
  const std::string empty = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  std::string names = "{";
  for (int i = 0; names.size() < kBytes; ++i) names += core::str("\"", i, "\":", empty, ",");
  const std::vector<std::string> headers{
      names + "\"0\":" + empty + "}",  // the first name again
      names + R"("last":{"dtype":"F32","shape":[0],"data_offsets":[9,9]}})",  // a hole at the end
      repeated("[", kBytes),
      repeated(R"({"":)", kBytes),
      R"({"a":{"dtype":")" + repeated("\\u0001", kBytes) +
          R"(","shape":[0],"data_offsets":[0,0]}})",
      R"({"a":{"dtype":"F32","shape":[1)" + repeated(",1", kBytes) + R"(],"data_offsets":[0,0]}})",
      R"({"__metadata__":{"a":[1)" + repeated(",1", kBytes) + "]}}"};
  double slowest = 0;
  for (const std::string& header : headers) {
    slowest = std::max(slowest, milliseconds_to_refuse(path, header));
  }
  return {{"ms", slowest}};
}

nlohmann::json files(const std::string& folder, std::int64_t mib) {
  checkpointing::Tensors part(weights(mib));
  const StateDict state = part.state_dict();
  checkpointing::write_safetensors_model(folder + "/hf", state);
  fs::rename(folder + "/hf/model.safetensors", folder + "/state.safetensors");
  checkpointing::write_torch(folder + "/state.pt", state);
  return {};
}

nlohmann::json run(const std::vector<std::string>& given) {
  const auto number = [&](std::size_t i) { return std::stoi(given.at(i)); };
  const std::string& what = given.at(0);
  if (what == "save") return save(given.at(1), number(2), number(3));
  if (what == "async") return asynchronous(given.at(1), number(2), number(3));
  if (what == "entries") return entries(given.at(1), number(2));
  if (what == "hostile") return hostile(given.at(1));
  if (what == "files") return files(given.at(1), number(2));
  if (what == "load") {
    return load(number(2), [&] { return checkpointing::read_state(given.at(1)); });
  }
  if (what == "load_torch") {
    return load(number(2),
                [&] { return checkpointing::read_torch(given.at(1), {.verify = false}); });
  }
  core::fail("state_files",
             "expected save, async, load, load_torch, entries, hostile or files, got '", what, "'");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::cout << run({argv + 1, argv + argc}).dump() << std::endl;
    return 0;
  } catch (const std::exception& e) {
    std::cerr << "state_files: " << e.what() << '\n';
    return 1;
  }
}
