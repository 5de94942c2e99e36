// Independent jobs on a few threads of their own: files are written and read beside a training that
// keeps OpenMP's threads busy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace cairn::checkpointing {

inline constexpr int kFileThreads = 4;  // that write or read one file

/// Threads worth starting for so many bytes: 1 to `most`, and no more than there are cores.
int threads_for(std::uint64_t bytes, std::uint64_t most = kFileThreads);

/// Calls work(0) ... work(jobs - 1), in order on one thread, each taken by whichever is free on
/// several. Returns when all are done; rethrows what the first one threw, after which no new one
/// begins.
void on_threads(int threads, std::size_t jobs, const std::function<void(std::size_t)>& work);

}  // namespace cairn::checkpointing
