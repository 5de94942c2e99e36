// Times pieces of work, one JSON line each: the fastest and the median run in milliseconds, the
// share where there is something to take it of (median over runs in turn), the bytes and operations
// of a run, how often it asks the system for memory, the device's peak memory before that something
// joined it, and how much the process grew (VmHWM over what it was).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"
#include "cairn/core/stream.h"
#include "support/flags.h"
#include "works.h"

namespace {

using cairn::Device;

struct Flags {
  std::string device = "cpu", name;
  double seconds = 1.0;
  bool list = false, tiny = false;
};

void wait() {
  const Device device = cairn::core::default_device();
  if (device.is_cuda()) cairn::core::Stream::current(device).synchronize();
}

/// Milliseconds a run; on a GPU of several that are queued one behind the other.
double milliseconds(const bench::Run& run, int repeats) {
  wait();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) run();
  wait();
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::milli>(end - start).count() / repeats;
}

/// So many that a GPU is busy for 10 ms between two waits. The CPU's runs are timed one by one.
int repeats_of(const bench::Run& run, bool tiny) {
  if (tiny || cairn::core::default_device().is_cpu()) return 1;
  milliseconds(run, 1);  // loads kernels, makes handles
  return static_cast<int>(std::clamp(std::ceil(10.0 / milliseconds(run, 3)), 1.0, 1000.0));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// On a GPU bytes are compared with a copy of as many.
bench::Run loop_of(const bench::Work& work) {
  if (work.bytes > 0 && cairn::core::default_device().is_cuda())
    return bench::device_copy(work.bytes);
  return work.loop ? work.loop() : bench::Run();
}

nlohmann::json facts(const bench::Work& work) {
  nlohmann::json row{{"work", work.name}};
  if (work.bytes > 0) row["bytes"] = work.bytes;
  if (work.operations > 0) row["operations"] = work.operations;
  if (work.items > 0) row["items"] = work.items;
  if (!work.kernels.empty()) row["kernels"] = work.kernels;
  return row;
}

/// Where there is a loop it runs in turn with the work: what else the machine does meets both.
nlohmann::json measure(const bench::Work& work, const Flags& flags) {
  const Device device = cairn::core::default_device();
  cairn::core::release_cached_memory(device);
  cairn::core::reset_peak_memory(device);
  cairn::core::reset_most_process_memory();
  const auto before = static_cast<double>(cairn::core::process_memory("VmRSS"));
  const bench::Run run = work.prepare();
  const int repeats = repeats_of(run, flags.tiny);
  milliseconds(run, 1);
  milliseconds(run, 1);  // what the first made and kept is there now
  nlohmann::json row = facts(work);
  row["process_bytes"] = static_cast<double>(cairn::core::process_memory("VmHWM")) - before;
  row["peak_bytes"] = cairn::core::memory_stats(device).peak_total;
  const cairn::core::ProcessParts parts = cairn::core::process_parts();
  row["process_parts"] = {{"code", parts.code},     {"tensors", parts.tensors},
                          {"heap", parts.heap},     {"heap_free", parts.heap_free},
                          {"stacks", parts.stacks}, {"other", parts.other}};

  const bench::Run loop = loop_of(work);
  const int loop_repeats = loop ? repeats_of(loop, flags.tiny) : 0;
  std::vector<double> times, loop_times, shares;
  double total = 0, runs = 0;
  std::uint64_t asked = 0;  // the system for memory
  const int warm = flags.tiny ? 0 : -1, least = flags.tiny ? 1 : 5;
  for (int turn = warm; turn < least || total < flags.seconds * 1000; ++turn) {
    const double loop_ms = loop ? milliseconds(loop, loop_repeats) : 0.0;
    const std::uint64_t before = cairn::core::memory_stats(device).system_allocations;
    const double ms = milliseconds(run, repeats);
    if (turn < 0) continue;  // first runs touch memory for the first time
    asked += cairn::core::memory_stats(device).system_allocations - before, runs += repeats;
    times.push_back(ms), loop_times.push_back(loop_ms), shares.push_back(loop_ms / ms);
    total += ms * repeats + loop_ms * loop_repeats;
  }
  row["fastest_ms"] = *std::min_element(times.begin(), times.end());
  row["ms"] = median(times);
  row["system_allocations"] = static_cast<double>(asked) / runs;
  if (loop) row["loop_ms"] = median(loop_times), row["share"] = median(shares);
  return row;
}

std::vector<bench::Work> works_of(const Flags& flags) {
  std::vector<bench::Work> works;
  const auto add = [&](const std::vector<bench::Work>& group) {
    works.insert(works.end(), group.begin(), group.end());
  };
  if (cairn::core::default_device().is_cpu()) {
    add(bench::kernel_works()), add(bench::model_works()), add(bench::optimizer_works());
  } else {
    add(bench::memory_works(flags.tiny)), add(bench::product_works(flags.tiny));
    add(bench::attention_works(flags.tiny));
    add(bench::gpu_optimizer_works(flags.tiny)), add(bench::gpu_model_works(flags.tiny));
  }
  return works;
}

void time_one(const std::vector<bench::Work>& works, const Flags& flags) {
  const auto work =
      std::find_if(works.begin(), works.end(), [&](const auto& w) { return w.name == flags.name; });
  CAIRN_CHECK(work != works.end(), "cairn_works", "no work called '", flags.name,
              "' (cairn_works --list names them)");
  std::cout << measure(*work, flags) << std::endl;
}

int run(Flags flags) {
  const cairn::core::DefaultDeviceGuard guard(Device::parse(flags.device));
  const auto works = works_of(flags);
  if (flags.list) {
    for (const auto& work : works) std::cout << work.name << "\n";
  } else if (flags.name != "-") {
    time_one(works, flags);
  } else {
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream(line) >> flags.name >> flags.seconds;
      time_one(works, flags);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times pieces of work", "cairn_works");
  Flags flags;
  app.add_option("name", flags.name, "a work; -: lines 'NAME SECONDS' are read and answered");
  app.add_option("seconds", flags.seconds, "to time it for");
  app.add_option("--device", flags.device, "cpu or cuda; each has works of its own");
  app.add_flag("--list", flags.list, "names the works");
  app.add_flag("--tiny", flags.tiny, "sizes for a simulated GPU; its times mean nothing");
  return support::run_program(app, argc, argv, [&] { return run(flags); });
}
