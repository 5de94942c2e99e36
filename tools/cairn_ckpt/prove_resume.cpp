#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"
#include "killed_run.h"

namespace cairn::tools {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPlace = "{dir}";

// Checkpoints by step.
std::map<std::int64_t, std::string> steps_in(const std::string& dir) {
  std::map<std::int64_t, std::string> steps;
  for (const std::string& path : checkpointing::list_checkpoints(dir)) {
    const std::string name = fs::path(path).filename().string();
    if (name.starts_with("step-")) steps[std::stoll(name.substr(5))] = path;
  }
  return steps;
}

std::vector<std::string> command_for(const ProveResume& options, const std::string& dir) {
  std::vector<std::string> command;
  bool placed = false;
  for (std::string word : options.command) {
    for (std::size_t at = word.find(kPlace); at != std::string::npos; at = word.find(kPlace)) {
      word.replace(at, std::string(kPlace).size(), dir);
      placed = true;
    }
    command.push_back(word);
  }
  if (!placed) command.insert(command.end(), {"--checkpoint-dir", dir});
  if (options.steps > 0) command.insert(command.end(), {"--steps", std::to_string(options.steps)});
  return command;
}

// One run, into `dir`, with its output in `dir`.log.
class Training {
 public:
  Training(const ProveResume& options, const std::string& dir)
      : command_(command_for(options, dir)), dir_(dir), log_(dir + ".log") {
    fs::create_directories(dir);
    if (!steps_in(dir).empty()) {
      core::fail<core::DataError>("prove-resume", "expected a folder without checkpoints, got '",
                                  dir, "'");
    }
  }

  void to_its_end(const char* what) const {
    const RunResult result = run_until(command_, log_, [] { return false; });
    if (result.status != 0) {
      core::fail<core::Error>("prove-resume", "expected the ", what,
                              " run to end with status 0, got ", result.status,
                              " (its output: ", log_, ")");
    }
  }

  // Returns the step of the checkpoint at which it was killed.
  std::int64_t to_its_death(std::int64_t kill_at) const {
    std::int64_t step = 0;
    const RunResult result = run_until(command_, log_, [&] {
      const auto steps = steps_in(dir_);
      if (!steps.empty()) step = steps.rbegin()->first;
      return !steps.empty() && step >= kill_at;
    });
    if (!result.killed) {
      core::fail<core::Error>("prove-resume", "expected a checkpoint of step ", kill_at,
                              " or later while the program runs, got its end with status ",
                              result.status, " (its output: ", log_, ")");
    }
    return step;
  }

  const std::string& dir() const { return dir_; }
  const std::string& log() const { return log_; }

 private:
  std::vector<std::string> command_;
  std::string dir_, log_;
};

struct Saved {
  checkpointing::CheckpointSummary summary;
  fs::file_time_type written;
};
using Saves = std::map<std::int64_t, Saved>;  // by step

Saves saves_in(const std::string& dir) {
  Saves all;
  for (const auto& [step, path] : steps_in(dir)) {
    try {
      all[step] = {checkpointing::summarize_checkpoint(path), fs::last_write_time(path)};
    } catch (const core::DataError&) {  // the kill came into the midst of it
    }
  }
  return all;
}

// Where saves do not tell what they continue: a run that began anew would have written the first
// again.
bool stand_as_before(const Saves& before, const Saves& now) {
  const auto there = [&](const auto& one) { return now.contains(one.first); };
  const auto as_before = [&](const auto& one) {
    const auto again = now.find(one.first);
    return again == now.end() || again->second.written == one.second.written;
  };
  return std::any_of(before.begin(), before.end(), there) &&
         std::all_of(before.begin(), before.end(), as_before);
}

// Whether the run whose saves are `now` went on from one that stood before it.
bool continued(const Saves& before, const Saves& now) {
  const std::vector<std::uint64_t>& line = now.rbegin()->second.summary.continues;
  if (line.empty()) return stand_as_before(before, now);
  return std::any_of(before.begin(), before.end(), [&](const auto& one) {
    const std::uint64_t id = one.second.summary.id;
    return id == now.rbegin()->second.summary.id ||
           std::find(line.begin(), line.end(), id) != line.end();
  });
}

void check_continued(const Saves& before, const Saves& now, const std::string& log) {
  if (now.empty() || continued(before, now)) return;
  core::fail<core::Error>("prove-resume",
                          "expected the second run to continue the killed one, got one ",
                          "that began anew (does the program resume from the folder it saves to? ",
                          "its output: ", log, ")");
}

// Compares the steps that both still have, the earliest first.
int compare_runs(const std::string& unbroken, const std::string& resumed) {
  const auto theirs = steps_in(unbroken), ours = steps_in(resumed);
  if (theirs.empty() || ours.empty() || theirs.rbegin()->first != ours.rbegin()->first) {
    const auto last = [](const auto& steps) { return steps.empty() ? -1 : steps.rbegin()->first; };
    core::fail<core::Error>("prove-resume",
                            "expected both runs to end with the same checkpoint, got steps ",
                            last(theirs), " and ", last(ours));
  }
  std::size_t entries = 0;
  for (const auto& [step, path] : theirs) {
    const auto other = ours.find(step);
    if (other == ours.end()) continue;
    const Differences all = compare(read_contents(path), read_contents(other->second),
                                    "the unbroken run", "the resumed run");
    entries = all.entries;
    if (all.lines.empty()) continue;
    std::cout << "resume: differs first at step " << step << ", in " << all.lines.front() << '\n'
              << "  " << all.lines.size() << " of " << all.entries << " entries differ";
    if (!all.largest_of.empty()) {
      std::cout << ", by at most " << all.largest << " in " << printable(all.largest_of);
    }
    std::cout << '\n';
    return 1;
  }
  std::cout << "resume: bit-exact, " << entries << " entries at step " << theirs.rbegin()->first
            << '\n';
  return 0;
}

std::string temporary_folder() {
  std::string name = (fs::temp_directory_path() / "prove-resume-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    core::fail<core::IoError>("prove-resume", "expected to make a folder '", name, "', got none");
  }
  return name;
}

}  // namespace

int prove_resume(const ProveResume& options) {
  const bool temporary = options.folder.empty();
  const std::string folder = temporary ? temporary_folder() : options.folder;
  const Training unbroken(options, folder + "/unbroken"), broken(options, folder + "/resumed");
  unbroken.to_its_end("unbroken");
  std::cout << "unbroken: ended\n";
  const std::int64_t step = broken.to_its_death(options.kill_at);
  std::cout << "killed: after the checkpoint of step " << step << std::endl;
  const Saves before = saves_in(broken.dir());
  broken.to_its_end("resumed");
  check_continued(before, saves_in(broken.dir()), broken.log());
  std::cout << "resumed: ended\n";
  const int status = compare_runs(unbroken.dir(), broken.dir());
  if (status == 0 && temporary) {
    fs::remove_all(folder);
  } else {
    std::cout << "both runs: " << folder << '\n';
  }
  return status;
}

}  // namespace cairn::tools
