#include "outcome.h"

#include <algorithm>
#include <chrono>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/process_memory.h"

namespace memory_pressure {

using namespace cairn;

namespace {

Job small(Job job) {
  job.sizes = {.words = 500,
               .width = job.sizes.width,
               .length = 8,
               .sentences = job.pieces,
               .blocks = 8,
               .channels = job.sizes.channels,
               .side = 16};
  job.steps = 1;
  return job;
}

std::vector<Device> cpus(int count) {
  std::vector<Device> devices;
  devices.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) devices.push_back({core::DeviceType::cpu, i});
  return devices;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

Outcome measure(const Way& way, const Job& job) {
  const std::vector<Device> devices = cpus(job.devices);
  way.train(small(job), [] {});
  for (const Device device : devices) {
    core::release_cached_memory(device);
    core::reset_peak_memory(device);
    if (job.budget > 0) core::set_memory_capacity(device, job.budget);
  }
  core::reset_most_process_memory();

  Outcome outcome;
  outcome.name = way.name;
  outcome.program = core::process_memory("VmRSS");
  std::vector<double> seconds;
  auto last = std::chrono::steady_clock::now();
  const auto stepped = [&] {
    const auto now = std::chrono::steady_clock::now();
    seconds.push_back(std::chrono::duration<double>(now - last).count());
    last = now;
  };
  try {
    outcome.losses = way.train(job, stepped);
  } catch (const core::OutOfMemory& error) {
    outcome.refusal = error.what();
  }
  if (seconds.size() > 1) seconds.erase(seconds.begin());  // touches its memory for the first time
  outcome.seconds = median(seconds);
  for (const Device device : devices) {
    const std::size_t peak = core::memory_stats(device).peak_total;
    outcome.device = std::max(outcome.device, peak);
    outcome.tensors += peak;
  }
  outcome.process = core::process_memory("VmHWM");
  return outcome;
}

}  // namespace memory_pressure
