// What an allocator of segments asks of a GPU's system where lengths change from step to step:
// GPT-2 124M's tensors, as many tokens a sequence as are drawn anew each step, on addresses without
// memory behind them. A line of JSON for each kind of batch, over several seeds: calls of the
// system (cudaMalloc, cudaFree), in the first steps and a later step, beside those of a system that
// is asked for each block; and what is reserved over the most that was live, median and most.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "allocator.h"
#include "gpt2_blocks.h"
#include "support/flags.h"

namespace {

using namespace cairn;
using core::Storage;

constexpr int kFirst = 20;  // steps

struct Flags {
  int steps = 400, seeds = 20;
};

class Addresses final : public core::SystemMemory {
 public:
  void* allocate(std::size_t bytes) override {
    ++calls;
    return std::exchange(next_, next_ + bytes);
  }
  void release(void* /*data*/, std::size_t /*bytes*/) noexcept override { ++calls; }
  bool gives_segments() const override { return true; }

  int calls = 0;

 private:
  char* next_ = reinterpret_cast<char*>(std::size_t{1} << 40);
};

struct Batch {
  const char* name;
  std::size_t sequences, least, most;  // tokens of each
};

struct Run {
  int first = 0, later = 0, blocks = 0;  // calls, and requests of the later steps
  double reserved = 0;                   // over the most that was live
};

Run run(const Batch& batch, unsigned seed, int steps) {
  Addresses system;
  core::Allocator allocator({core::DeviceType::cuda, 0}, /*pinned=*/false, &system);
  bench::Gpt2Blocks<std::shared_ptr<Storage>> model([&](std::size_t bytes) {
    std::shared_ptr<Storage> storage = Storage::wrap(nullptr, 0, {}, nullptr);
    allocator.allocate(*storage, bytes, core::MemoryCategory::activations, nullptr);
    return storage;
  });
  std::mt19937 random(seed);
  Run found;
  std::uint64_t requests = 0;
  for (int k = 0; k < steps; ++k) {
    if (k == kFirst) found.first = system.calls, requests = allocator.stats().allocations;
    model.step(batch.sequences * (batch.least + random() % (batch.most + 1 - batch.least)));
  }
  const core::MemoryStats stats = allocator.stats();
  found.later = system.calls - found.first;
  found.blocks = static_cast<int>(stats.allocations - requests);
  found.reserved = static_cast<double>(stats.reserved) / static_cast<double>(stats.peak_total);
  return found;
}

nlohmann::json measure(const Batch& batch, const Flags& flags) {
  double first = 0, later = 0, blocks = 0;
  int without = 0;
  std::vector<double> reserved;
  for (int seed = 1; seed <= flags.seeds; ++seed) {
    const Run found = run(batch, static_cast<unsigned>(seed), flags.steps);
    first += found.first, later += found.later, blocks += found.blocks;
    without += found.later == 0 ? 1 : 0;
    reserved.push_back(found.reserved);
  }
  std::sort(reserved.begin(), reserved.end());
  const double steps = static_cast<double>(flags.seeds) * (flags.steps - kFirst);
  return {{"work", batch.name},
          {"runs", flags.seeds},
          {"runs_without_later_calls", without},
          {"calls_of_first_steps", first / flags.seeds},
          {"calls_a_later_step", later / steps},
          {"calls_a_step_block_by_block", 2 * blocks / steps},
          {"reserved_of_live", reserved[reserved.size() / 2]},
          {"most_reserved_of_live", reserved.back()}};
}

int run_all(const Flags& flags) {
  for (const Batch& batch : {Batch{"GPT-2 124M, 4 x 512 - 1,024 tokens", 4, 512, 1024},
                             Batch{"GPT-2 124M, 16 x 512 - 1,024 tokens", 16, 512, 1024},
                             Batch{"GPT-2 124M, 4 x 16 - 1,024 tokens", 4, 16, 1024},
                             Batch{"GPT-2 124M, 16 x 16 - 1,024 tokens", 16, 16, 1024}})
    std::cout << measure(batch, flags) << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Counts what lengths that change ask of a GPU's system", "changing_lengths");
  Flags flags;
  app.add_option("--steps", flags.steps, "of a run")->check(CLI::Range(kFirst + 1, 1000000));
  app.add_option("--seeds", flags.seeds, "runs of each kind of batch")->check(CLI::Range(1, 1000));
  return support::run_program(app, argc, argv, [&] { return run_all(flags); });
}
