#include "other_machines.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "cairn/core/rank_report.h"

namespace cairn::run {
namespace {

using core::RankReport;
using std::chrono::milliseconds;

constexpr auto kPatienceForRanks = milliseconds(4000), kPause = milliseconds(10);

std::string bytes_of(const std::string& path) {
  std::string all;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return all;
  std::array<char, 1 << 16> some;
  for (ssize_t got = 0;
       (got = pread(file, some.data(), some.size(), static_cast<off_t>(all.size()))) > 0;)
    all.append(some.data(), static_cast<std::size_t>(got));
  close(file);
  return all;
}

RankStatus status_of(const RankReport& told, double now) {
  RankStatus rank{.pid = told.process};
  rank.host = printable(told.host);
  rank.rank = told.rank;
  rank.world_size = told.world_size;
  rank.device = printable(told.device);
  rank.state = 'R';  // it has answered
  rank.memory = told.memory;
  rank.steps = told.steps, rank.step = told.step;
  rank.step_at = now - told.step_age;
  rank.step_seconds = told.step_seconds, rank.step_waits = told.step_waits;
  if (told.steps > 0) rank.losses.push_back(static_cast<float>(told.loss));
  rank.collectives = told.collectives, rank.waited = told.waited;
  rank.temperature = told.temperature;
  for (const RankReport::Thread& thread : told.threads) {
    rank.threads.push_back({thread.id, printable(thread.part), printable(thread.wait),
                            now - thread.part_age, now - thread.wait_age});
  }
  return rank;
}

/// Those of all ranks, where they come in time.
std::vector<RankReport> ask_rank_0(const RankStatus& rank) {
  const auto page = hold_page(rank);
  if (!page) return {};
  const auto now = std::chrono::steady_clock::now();
  const auto number = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count());
  page->ranks_asked = number;
  while (page->ranks_answered != number) {
    if (std::chrono::steady_clock::now() - now > kPatienceForRanks) return {};
    std::this_thread::sleep_for(kPause);
  }
  const std::string bytes = bytes_of("/proc/" + std::to_string(rank.pid) + "/fd/" +
                                     std::to_string(page->ranks_file.load()));
  core::Unpacker from(bytes);
  std::vector<RankReport> all;
  for (std::uint64_t n = from.count(8); n > 0; --n) {
    const std::string one = from.text();
    if (!one.empty()) all.push_back(RankReport::unpack(one));
  }
  return all;
}

}  // namespace

void add_other_machines(JobStatus& job) try {
  const RankStatus& first = job.ranks.front();
  const bool whole = job.ranks.size() >= static_cast<std::size_t>(first.world_size);
  if (first.rank != 0 || whole) return;
  for (const RankReport& told : ask_rank_0(first)) {
    const bool known = std::any_of(job.ranks.begin(), job.ranks.end(),
                                   [&](const RankStatus& one) { return one.rank == told.rank; });
    if (!known) job.ranks.push_back(status_of(told, job.read_at));
  }
  std::sort(job.ranks.begin(), job.ranks.end(),
            [](const RankStatus& a, const RankStatus& b) { return a.rank < b.rank; });
} catch (const core::Error&) {  // it wrote what cannot be read: it is not there
} catch (const NoSuchJob&) {    // another process asks it
}

}  // namespace cairn::run
