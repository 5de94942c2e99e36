// Random sequences of what a trainer may do, on one rank, on two and on four, against the
// reference.
//
// CAIRN_STATEFUL_SEQUENCES says how many (1,200 by default); a failure
// prints the shortest sequence that still fails and the seed: RC_PARAMS="seed=..." runs it again.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/core/log.h"
#include "commands.h"
#include "generators.h"
#include "support/gpu_schedule.h"
#include "support/rank_device.h"
#include "support/search.h"

namespace cairn::stateful {
namespace {

struct Script {
  stateful::Setup setup;
  int schedule = 0;  // of simulated GPUs
  std::vector<CommandPtr> commands;
};

std::ostream& operator<<(std::ostream& out, const Script& script) {
  out << "\n  " << script.setup;
  if (script.schedule > 0) out << ", GPUs' schedule " << script.schedule;
  for (const CommandPtr& command : script.commands) {
    out << "\n  ";
    command->show(out);
  }
  return out;
}

rc::Gen<Script> scripts(int ranks) {
  const auto commands = rc::gen::weightedOneOf<CommandPtr>({{21, training_commands()},
                                                            {9, between_commands()},
                                                            {10, own_commands()},
                                                            {8, state_commands()}});
  return rc::gen::map(rc::gen::tuple(setups(ranks), one_of(30),
                                     rc::gen::container<std::vector<CommandPtr>>(commands)),
                      [](const auto& drawn) {
                        const auto& [setup, schedule, list] = drawn;
                        return Script{setup, schedule, list};
                      });
}

/// Says what it is about to do, and where and why the system parts from the reference.
void run(const Script& script, const std::function<void(const std::string&)>& say) {
  try {
    say("building");
    Case now(script.setup);
    for (const CommandPtr& command : script.commands) {
      if (now.over) break;
      if (!command->possible(now)) continue;
      std::ostringstream where;
      command->show(where);
      say(where.str());
      command->run(now);
    }
    say("ending");
  } catch (const Mismatch& mismatch) {
    return say(std::string("mismatch: ") + mismatch.what());
  }
  say("done");
}

constexpr unsigned kSeconds = 120;  // after which a sequence counts as hung
constexpr char kEnd = '\0';         // of each thing said

/// run() in a process of its own, so that a crash and a hang are findings like others and shrink
/// too. Empty: the two agreed; else where they parted.
std::string run_apart(const Script& script) {
  int ends[2] = {-1, -1};
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSeconds);
    test::set_gpu_schedule(script.schedule);
    run(script, [&](const std::string& text) {
      const std::string ended = text + kEnd;
      if (write(ends[1], ended.data(), ended.size()) < 0) _exit(1);
    });
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  std::array<char, 4096> block{};
  for (ssize_t n = 0; (n = read(ends[0], block.data(), block.size())) > 0;) {
    said.append(block.data(), static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  std::vector<std::string> lines;
  std::istringstream in(said);
  for (std::string line; std::getline(in, line, kEnd);) lines.push_back(line);
  lines.insert(lines.begin(), 2, "starting");
  if (WIFSIGNALED(status)) {
    const std::string how = WTERMSIG(status) == SIGALRM
                                ? "hung"
                                : "ended by signal " + std::to_string(WTERMSIG(status));
    return "in " + lines.back() + ": " + how;
  }
  if (lines.back() == "done") return {};
  std::string all;  // what was possible
  for (std::size_t i = 2; i + 1 < lines.size(); ++i) all += lines[i] + "\n  ";
  return all + lines.back();
}

int sequences() {
  return std::max(2, test::number_in("CAIRN_STATEFUL_SEQUENCES", 1200));
}

/// share: of all sequences.
void search(int ranks, double share) {
  if (!test::has_devices_of(ranks)) GTEST_SKIP() << "needs a GPU for each rank";
  log::set_level(log::Level::off);
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = std::max(1, static_cast<int>(sequences() * share));
  params.maxSize = 60;
  std::string first;  // before it was shrunk: all that tells of a sequence that fails by chance
  const auto result = rc::detail::checkTestable(
      [ranks, &first] {
        const Script script = *scripts(ranks).as("sequence");
        const std::string mismatch = run_apart(script);
        if (first.empty()) first = mismatch;
        if (!mismatch.empty()) RC_FAIL(mismatch);
      },
      rc::detail::TestMetadata{"stateful", "stateful"}, params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  FAIL() << text.str() << "\nbefore it was shrunk: " << first
         << "\nagain: RC_PARAMS=\"seed=" << params.seed << "\"";
}

TEST(Stateful, OneRank) {
  search(1, 0.4);
}

TEST(Stateful, TwoRanks) {
  search(2, 0.4);
}

TEST(Stateful, FourRanks) {
  search(4, 0.2);
}

/// On a GPU too: the sequences' kernels are counted in their processes. Last, as one that has used
/// a GPU cannot be forked.
TEST(Stateful, TheTestedDeviceComputes) {
  const Tensor x = Tensor::full({3}, 2.0);
  EXPECT_EQ((x + x).to_vector(), std::vector<double>(3, 4.0));
}

}  // namespace
}  // namespace cairn::stateful
