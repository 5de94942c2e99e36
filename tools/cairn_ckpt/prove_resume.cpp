#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <set>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"
#include "killed_run.h"
#include "written_names.h"

namespace cairn::tools {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPlace = "{dir}";

// Of "step-00000500"; -1 for any other name.
std::int64_t step_in(const std::string& name) {
  const bool digits = name.size() > 5 && name.starts_with("step-") &&
                      name.find_first_not_of("0123456789", 5) == std::string::npos;
  return digits ? std::stoll(name.substr(5)) : -1;
}

// Checkpoints by step.
std::map<std::int64_t, std::string> steps_in(const std::string& dir) {
  std::map<std::int64_t, std::string> steps;
  for (const std::string& path : checkpointing::list_checkpoints(dir)) {
    const std::int64_t step = step_in(fs::path(path).filename().string());
    if (step >= 0) steps[step] = path;
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

  /// Looks at `written` all the while: the system keeps only so many names for it.
  void to_its_end(const char* what, WrittenNames* written = nullptr) const {
    const RunResult result = run_until(command_, log_, [&] {
      if (written != nullptr) written->look();
      return false;
    });
    if (written != nullptr) written->look();
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

using Saves = std::map<std::int64_t, checkpointing::CheckpointSummary>;  // by step

Saves saves_in(const std::string& dir) {
  Saves all;
  for (const auto& [step, path] : steps_in(dir)) {
    try {
      all[step] = checkpointing::summarize_checkpoint(path);
    } catch (const core::DataError&) {  // the kill came into the midst of it
    }
  }
  return all;
}

// Whether the newest save tells of a line without any of those. A manifest names no more than a
// hundred, and what converts a file names none.
bool left_behind(const Saves& before, const Saves& now) {
  constexpr std::size_t kLongestLine = 100;
  const std::vector<std::uint64_t>& line = now.rbegin()->second.continues;
  if (line.empty() || line.size() >= kLongestLine) return false;
  return std::none_of(before.begin(), before.end(), [&](const auto& one) {
    return std::find(line.begin(), line.end(), one.second.id) != line.end();
  });
}

// Equal bits prove nothing where the second run made all of them again, or had nothing to do.
// `written`: the names that it gave in its folder.
void check_continued(const Saves& before, const Saves& now, const WrittenNames& written,
                     const std::string& log) {
  if (before.empty() || now.empty()) return;  // compare_runs tells
  const std::int64_t killed_at = before.rbegin()->first;
  const auto again = [&](const std::string& name) {
    return step_in(name) >= 0 && step_in(name) <= killed_at;
  };
  const std::set<std::string>& names = written.names();
  const bool anew = written.folder_removed() || left_behind(before, now) ||
                    std::any_of(names.begin(), names.end(), again);
  if (anew) {
    core::fail<core::Error>(
        "prove-resume", "expected the second run to continue the killed one, got one that began ",
        "anew (does the program resume from the folder it saves to? its output: ", log, ")");
  }
  if (now.rbegin()->first > killed_at) return;
  core::fail<core::Error>("prove-resume", "expected the second run to save after step ", killed_at,
                          ", at which the first was killed, got no later checkpoint (a lower "
                          "--kill-at leaves it more to do; its output: ",
                          log, ")");
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
  WrittenNames written(broken.dir());
  broken.to_its_end("resumed", &written);
  check_continued(before, saves_in(broken.dir()), written, broken.log());
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
