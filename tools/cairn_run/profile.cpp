// `cairn-run profile`: writes into the ranks' pages which steps their runs are to trace, and waits
// for what becomes of it.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <thread>

#include "ask.h"
#include "options.h"

namespace cairn::run {
namespace {

using core::StatusPage;

struct AskedRank {
  RankStatus status;
  std::shared_ptr<StatusPage> page;
  bool answered = false;
};

struct Steps {
  std::int64_t first = 0, last = 0;  // first 0: `last` next ones
};

Steps parse_steps(const std::string& text) {
  const auto number = [&](std::string_view part) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    const bool fits = error == std::errc{} && end == part.data() + part.size() && value > 0 &&
                      value < std::numeric_limits<std::int64_t>::max() / 2;
    return fits ? value : 0;
  };
  const std::size_t colon = text.find(':');
  Steps steps{.last = number(std::string_view(text).substr(colon + 1))};  // npos + 1 is 0
  if (colon != std::string::npos) steps.first = number(text.substr(0, colon));
  const bool range = colon == std::string::npos || steps.first > 0;
  if (range && steps.last > 0 && steps.first <= steps.last) return steps;
  throw UsageError("--steps must be a number of steps or FIRST:LAST, as 20:25, got '" +
                   printable(text) + "'");
}

/// Those of the ranks that have a run.
std::vector<AskedRank> ranks_to_ask(const JobStatus& job) {
  std::vector<AskedRank> ranks;
  for (const RankStatus& status : job.ranks) {
    if (status.page->profilers <= 0) continue;
    if (status.steps == 0)
      throw NoSuchJob("rank " + std::to_string(status.rank) + " has told no step yet");
    if (auto page = hold_page(status)) ranks.push_back({status, std::move(page)});
  }
  if (ranks.empty())
    throw NoSuchJob("no rank of job " + job.name +
                    " has an observe::Run (--observe), which traces");
  return ranks;
}

void ask_for(const std::vector<AskedRank>& ranks, const Steps& steps) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto number = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  for (const AskedRank& rank : ranks) {
    StatusPage::ProfileRequest& request = rank.page->profile;
    request.number = 0;
    request.first = steps.first;
    request.last = steps.last;
    request.joining_rank = ranks.front().status.rank;
    request.ranks = static_cast<std::int32_t>(ranks.size());
    request.number = static_cast<std::uint64_t>(number);
  }
}

/// What became of it, once that is known.
std::string answer_of(const AskedRank& rank) {
  const StatusPage& page = *rank.page;
  if (page.profile_answered == page.profile.number)
    return printable(page.profile_answer.get().text);
  const char state = process_state("/proc/" + std::to_string(rank.status.pid)).state;
  const bool lives = state != '?' && state != 'Z' && state != 'X';
  return lives && page.profilers > 0 ? "" : "its run has ended";
}

}  // namespace

int profile(const JobStatus& job, const std::string& text) {
  Steps steps = parse_steps(text);
  std::vector<AskedRank> ranks = ranks_to_ask(job);
  std::int64_t told = 0;
  for (const AskedRank& rank : ranks) told = std::max(told, rank.status.page->step.load());
  if (steps.first == 0)
    steps = {told + 2, told + 1 + steps.last};  // 1: may be over when it is read
  ask_for(ranks, steps);
  print("asked " + std::to_string(ranks.size()) + " ranks of job " + job.name + " for steps " +
        std::to_string(steps.first) + " to " + std::to_string(steps.last) + "\n");
  bool refused = false;
  for (std::size_t left = ranks.size(); left > 0;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (AskedRank& rank : ranks) {
      const std::string answer = rank.answered ? "" : answer_of(rank);
      if (answer.empty()) continue;
      rank.answered = true;
      --left;
      const bool done =
          rank.page->profile_answered == rank.page->profile.number && !rank.page->profile_refused;
      refused = refused || !done;
      print("rank " + std::to_string(rank.status.rank) + ": " + answer + "\n");
    }
  }
  return refused ? 1 : 0;
}

}  // namespace cairn::run
