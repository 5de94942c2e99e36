// memory_pressure: the language model of the tutorials, whose output alone is 1.28 GB, on devices
// of 1 GiB. Plain training runs out of memory and says why; each other way fits, and learns the
// same. Then a chain of which one sample does not fit. Each way runs in a process of its own, so
// that what the operating system saw of it (VmHWM) stands beside what Cairn's accounts say.
//
//   memory_pressure --picture memory.svg
//   memory_pressure --scale 0.1           a tenth of the words, the image and the budget
//   memory_pressure --only fused --budget 300M
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "chain.h"
#include "child.h"
#include "language_model.h"
#include "picture.h"
#include "support/flags.h"
#include "support/reporter.h"

namespace {

using namespace cairn;
using memory_pressure::Job;
using memory_pressure::Outcome;
using memory_pressure::Way;

struct Flags {
  std::uint64_t budget = std::uint64_t{1} << 30;
  int devices = 4, steps = 3, pieces = 8;
  double scale = 1.0;
  std::uint64_t seed = 1;
  std::string picture;
  std::vector<std::string> only;
  std::string measured;  // "part/way", of a process that measures it

  void add_to(CLI::App& app) {
    app.option_defaults()->always_capture_default();
    app.add_option("--budget", budget, "memory of each device: 1G, 300M")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
        ->default_str("1G");
    app.add_option("--devices", devices,
                   "how many devices the balanced way has, and the ranks of ddp, zero and fsdp")
        ->check(CLI::Range(1, 64));
    app.add_option("--scale", scale, "shrinks the words, the image and the budget")
        ->check(CLI::Range(0.01, 1.0));
    app.add_option("--steps", steps, "optimizer steps of each way")->check(CLI::Range(1, 1000));
    app.add_option("--pieces", pieces, "micro-batches, and pieces of the loss")
        ->check(CLI::Range(2, 32));
    app.add_option("--seed", seed, "of initialisation and sentences");
    app.add_option("--only", only, "these ways only; plain always runs")->delimiter(',');
    app.add_option("--picture", picture,
                   "an SVG of peak memory against step time; none: no picture");
    app.add_option("--measure", measured)->group("");  // what a process of its own is started with
  }

  Job job() const {
    Job job;
    job.sizes.words = std::lround(static_cast<double>(job.sizes.words) * scale);
    job.sizes.side = std::lround(static_cast<double>(job.sizes.side) * std::sqrt(scale));
    job.budget = static_cast<std::size_t>(static_cast<double>(budget) * scale);
    job.devices = devices;
    job.steps = steps;
    job.pieces = pieces;
    job.seed = seed;
    return job;
  }
  bool wants(const std::string& name) const {
    return name == "plain" || only.empty() ||
           std::find(only.begin(), only.end(), name) != only.end();
  }
  Outcome of(const std::string& part, const std::string& way, bool capped) const {
    return memory_pressure::run_child({"--measure", part + "/" + way, "--budget",
                                       std::to_string(capped ? budget : 0), "--devices",
                                       std::to_string(devices), "--scale", core::str(scale),
                                       "--steps", std::to_string(steps), "--pieces",
                                       std::to_string(pieces), "--seed", std::to_string(seed)});
  }
};

struct Part {
  std::string name, title;
  std::vector<Way> ways;
};

std::vector<Part> parts(const Job& job) {
  const memory_pressure::Sizes& s = job.sizes;
  return {{"words",
           core::str("a language model of ", s.words, " words: ", s.sentences, " sentences of ",
                     s.length),
           memory_pressure::language_model_ways()},
          {"chain",
           core::str("a chain of ", s.blocks, " blocks on one image of ", s.side, " x ", s.side),
           memory_pressure::chain_ways()}};
}

int measure_one(const Flags& flags) {
  log::set_level(log::Level::warn);  // the table is to be read
  const Job job = flags.job();
  for (const Part& part : parts(job)) {
    for (const Way& way : part.ways) {
      if (part.name + "/" + way.name != flags.measured) continue;
      std::cout << to_json(memory_pressure::measure(way, job)) << "\n";
      return 0;
    }
  }
  core::fail<core::InvalidArgument>("memory_pressure", "expected a way, got '", flags.measured,
                                    "'");
}

/// The largest difference of the losses, relative.
double difference(const Outcome& a, const Outcome& b) {
  double most = 0.0;
  for (std::size_t i = 0; i < std::min(a.losses.size(), b.losses.size()); ++i) {
    most = std::max(most, std::abs(a.losses[i] - b.losses[i]) / std::abs(b.losses[i]));
  }
  return most;
}

void print_header() {
  std::printf("%-16s %10s %9s %8s %10s %10s %10s %10s %6s\n", "way", "last loss", "differs",
              "s/step", "a device", "tensors", "+ program", "process", "ratio");
}

void print_row(const std::string& name, const Outcome& outcome, const Outcome& plain) {
  const std::size_t accounted = outcome.tensors + outcome.program;
  std::printf(
      "%-16s %10.5f %9.1e %8.2f %10s %10s %10s %10s %6.2f\n", name.c_str(), outcome.losses.back(),
      difference(outcome, plain), outcome.seconds, support::human_bytes(outcome.device).c_str(),
      support::human_bytes(outcome.tensors).c_str(), support::human_bytes(accounted).c_str(),
      support::human_bytes(outcome.process).c_str(),
      static_cast<double>(accounted) / static_cast<double>(outcome.process));
  std::fflush(stdout);
}

/// Plain, capped and then not, and every other way; the outcomes for the picture.
std::vector<Outcome> run_part(const Part& part, const Flags& flags) {
  const std::string capacity = support::human_bytes(flags.job().budget);
  std::printf("%s, at most %s on a device\n\n", part.title.c_str(), capacity.c_str());
  const Outcome refused = flags.of(part.name, "plain", /*capped=*/true);
  if (!refused.fits()) std::printf("plain, within it:\n%s\n\n", refused.refusal.c_str());
  print_header();
  Outcome plain = refused;
  if (!refused.fits()) {
    plain = flags.of(part.name, "plain", /*capped=*/false);
    plain.refusal = refused.refusal;
  }
  print_row(plain.fits() ? "plain" : "plain, no limit", plain, plain);
  std::vector<Outcome> outcomes{plain};
  for (const Way& way : part.ways) {
    if (way.name == "plain" || !flags.wants(way.name)) continue;
    const Outcome outcome = flags.of(part.name, way.name, /*capped=*/true);
    if (outcome.fits()) {
      print_row(way.name, outcome, plain);
      outcomes.push_back(outcome);
    } else {
      std::printf("%-16s does not fit: %s\n", way.name.c_str(),
                  outcome.refusal.substr(0, outcome.refusal.find('\n')).c_str());
    }
  }
  std::printf("\n");
  for (const Way& way : part.ways) {
    if (flags.wants(way.name)) std::printf("%-16s %s\n", way.name.c_str(), way.what.c_str());
  }
  std::printf("\n");
  return outcomes;
}

void check_names(const Flags& flags, const std::vector<Part>& all) {
  for (const std::string& name : flags.only) {
    const bool known = std::any_of(all.begin(), all.end(), [&](const Part& part) {
      return std::any_of(part.ways.begin(), part.ways.end(),
                         [&](const Way& way) { return way.name == name; });
    });
    CAIRN_CHECK(known, "memory_pressure", "expected the name of a way, got '", name, "'");
  }
}

int run(const Flags& flags) {
  setenv("CAIRN_CPU_DEVICES", std::to_string(flags.devices).c_str(), /*overwrite=*/1);
  if (!flags.measured.empty()) return measure_one(flags);
  const std::vector<Part> all = parts(flags.job());
  check_names(flags, all);
  std::vector<memory_pressure::Panel> panels;
  panels.reserve(all.size());
  for (const Part& part : all) {
    panels.push_back({part.title, run_part(part, flags), flags.job().budget});
  }
  std::printf(
      "differs: the losses of all steps from plain's, at most, relative. a device: peak of live\n"
      "tensors on the fullest one. tensors: the same, all devices together. program: the process\n"
      "with its code and libraries, before. process: what the operating system saw at most "
      "(VmHWM).\n"
      "ratio: of what is accounted to that.\n");
  if (!flags.picture.empty()) {
    memory_pressure::save_picture(flags.picture, panels);
    std::printf("wrote %s\n", flags.picture.c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains what does not fit into memory, in every way that makes it fit",
               "memory_pressure");
  Flags flags;
  flags.add_to(app);
  return support::run_program(app, argc, argv, [&] { return run(flags); });
}
