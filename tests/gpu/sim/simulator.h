// A CUDA machine made of software, for tests: the entry points that Cairn calls of the CUDA
// runtime, cuBLASLt, cuDNN, NCCL and NVTX, stricter than hardware. docs/gpu.md tells what is
// simulated and how to add an entry point.
//
// What hardware may do but seldom does, the simulator does: work runs as late as synchronisation
// allows (or at once, or shuffled), fresh and freed memory is poison, copies from pageable memory
// read their source late. What hardware lets pass, it reports: the process writes one line that
// starts with "gpusim:" to stderr and aborts.
//
// The environment configures it, once, at the first call:
//   CAIRN_SIM_GPUS=2              number of GPUs (default 1)
//   CAIRN_SIM_MEMORY=64M          of each (default 2G)
//   CAIRN_SIM_SHARED=99K          shared memory that a block may ask for (default 163K)
//   CAIRN_SIM_CAPABILITY=80       of the GPUs: 8.0 (default 90)
//   CAIRN_SIM_PEERS=0             no GPU can be given access to another's memory (default 1)
//   CAIRN_SIM_SCHEDULE=late       or early, or shuffled
//   CAIRN_SIM_SEED=7              of the order among streams (default 1)
//   CAIRN_SIM_FAULTS=cudaMalloc@3=2,cublasLtMatmul@1=15
//                                 the third cudaMalloc answers 2, and so on; "@2+" means from the
//                                 second on
//   CAIRN_SIM_REPORT=FILE         counters, as JSON, when the process ends
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gpu/sim/order.h"

namespace cairn::gpusim {

enum class Schedule { late, early, shuffled };

/// What this process did so far.
struct Counters {
  std::map<std::string, std::uint64_t> calls;  // of every entry point
  std::map<std::string, std::uint64_t> waits;  // "cudaStreamSynchronize in adam": host waits
  std::uint64_t kernels = 0;                   // launched, own and vendors'
  std::set<int> contexts;                      // devices that were made ready for work
};
Counters counters();

/// For the launches from now on; returns the one before.
Schedule set_schedule(Schedule schedule, std::uint64_t seed);

/// The nth next call of an entry point (1: the next one) answers `code` instead of being done; with
/// `and_later`, every one after it too.
void inject(const std::string& call, std::uint64_t nth, int code, bool and_later = false);
void clear_injected();

/// A work of a stream, and what is known to be done when it runs: by the order of its stream, by
/// events, and by what the host had waited for or seen done when it was queued.
struct TracedWork {
  std::string name;  // "cudaMemcpyAsync in gelu"
  Point point;
  Clock clock;
  bool runs_after(const TracedWork& other) const { return clock.knows(other.point); }
  /// Whether a GPU may run both at a time.
  bool runs_beside(const TracedWork& other) const {
    return !runs_after(other) && !other.runs_after(*this);
  }
};

/// Keeps the works that are queued from now on, in order; end_trace() returns them. Meanwhile
/// nothing runs that nobody waits for (Schedule::late), so that the host sees done only what must
/// be.
void begin_trace();
std::vector<TracedWork> end_trace();

}  // namespace cairn::gpusim
