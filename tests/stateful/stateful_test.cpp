// Random sequences of what a trainer may do, on one rank and on two, against the reference.
//
// CAIRN_STATEFUL_SEQUENCES says how many (2,000 by default, half of them on two ranks); a failure
// prints the shortest sequence that still fails and the seed: RC_PARAMS="seed=..." runs it again.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <ostream>
#include <sstream>
#include <string>

#include "cairn/core/log.h"
#include "commands.h"

namespace cairn::stateful {
namespace {

struct Script {
  Setup setup;
  std::vector<CommandPtr> commands;
};

std::ostream& operator<<(std::ostream& out, const Script& script) {
  out << "\n  " << script.setup;
  for (const CommandPtr& command : script.commands) {
    out << "\n  ";
    command->show(out);
  }
  return out;
}

rc::Gen<Script> scripts(int ranks) {
  return rc::gen::map(
      rc::gen::pair(setups(ranks), rc::gen::container<std::vector<CommandPtr>>(commands())),
      [](const auto& drawn) {
        return Script{drawn.first, drawn.second};
      });
}

/// Where and why the system parts from the reference; empty: nowhere.
std::string run(const Script& script) {
  std::ostringstream where;
  try {
    where << "building";
    Case now(script.setup);
    for (const CommandPtr& command : script.commands) {
      if (now.over) break;
      if (!command->possible(now)) continue;
      where.str("");
      command->show(where);
      command->run(now);
    }
  } catch (const Mismatch& mismatch) {
    return "after " + where.str() + ": " + mismatch.what();
  }
  return {};
}

int sequences() {
  const char* text = std::getenv("CAIRN_STATEFUL_SEQUENCES");
  return text == nullptr ? 2000 : std::max(2, std::atoi(text));
}

void search(int ranks) {
  log::set_level(log::Level::off);
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = sequences() / 2;
  params.maxSize = 60;
  const auto result = rc::detail::checkTestable(
      [ranks] {
        const Script script = *scripts(ranks).as("sequence");
        const std::string mismatch = run(script);
        if (!mismatch.empty()) RC_FAIL(mismatch);
      },
      rc::detail::TestMetadata{"stateful", "stateful"}, params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  FAIL() << text.str() << "\nagain: RC_PARAMS=\"seed=" << params.seed << "\"";
}

TEST(Stateful, OneRank) {
  search(1);
}

TEST(Stateful, TwoRanks) {
  search(2);
}

}  // namespace
}  // namespace cairn::stateful
