#include "ask.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <string_view>

#include "command_line/command_line.h"
#include "options.h"
#include "other_machines.h"
#include "output.h"

namespace cairn::run {
namespace {

constexpr const char* kJob =
    "Process id of cairn-run, of a rank or of any process above ranks; or ADDRESS:PORT where the "
    "ranks meet. Default: this user's";

JobStatus one_job(const std::string& name) {
  std::vector<JobStatus> jobs = find_jobs(name);
  if (jobs.size() == 1) return std::move(jobs.front());
  std::string names;
  for (const JobStatus& job : jobs) names += (names.empty() ? "" : ", ") + job.name;
  throw NoSuchJob("several jobs run: say which one, of " + names);
}

int status(const std::string& name, bool json) {
  std::vector<JobStatus> jobs = find_jobs(name);
  for (JobStatus& job : jobs) add_other_machines(job);
  if (json) {
    print(json_of(jobs));
    return 0;
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) print((i > 0 ? "\n" : "") + table_of(jobs[i], 0));
  return 0;
}

std::size_t columns() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 100;
}

sigset_t ending_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&set, number);
  return set;
}

/// The terminal's second screen, as editors use it, for as long as this lives. What ends programs
/// is left to wait_a_second(), so that the first screen comes back.
class SecondScreen {
 public:
  SecondScreen() {
    const sigset_t signals = ending_signals();
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    print("\033[?1049h\033[?25l");
  }
  ~SecondScreen() { print("\033[?25h\033[?1049l"); }
  SecondScreen(const SecondScreen&) = delete;
  SecondScreen& operator=(const SecondScreen&) = delete;
  /// Over what stands there, without a flicker.
  static void draw(const std::string& picture) {
    std::string text = "\033[H";
    for (const char c : picture) text += c == '\n' ? "\033[K\n" : std::string(1, c);
    print(text + "\033[J");
  }
};

/// False where a signal that ends programs came first.
bool wait_a_second() {
  const sigset_t signals = ending_signals();
  const timespec second{1, 0};
  return sigtimedwait(&signals, nullptr, &second) < 0;
}

JobStatus one_whole_job(const std::string& name) {
  JobStatus job = one_job(name);
  add_other_machines(job);
  return job;
}

int top(const std::string& name, bool once) {
  JobStatus job = one_whole_job(name);
  if (once) {
    print(picture_of(job, 0));
    return 0;
  }
  if (isatty(STDOUT_FILENO) == 0) throw UsageError("top needs a terminal (--once prints and ends)");
  std::string ended;
  {
    const SecondScreen screen;
    try {
      do {
        screen.draw(picture_of(job, columns()));
        if (!wait_a_second()) break;
        job = one_whole_job(name.empty() ? job.name : name);
      } while (true);
    } catch (const NoSuchJob& error) {
      ended = std::string("cairn-run: ") + error.what() + "\n";
    }
  }
  print(picture_of(job, columns()) + ended);
  return 0;
}

}  // namespace

void print(const std::string& text) {
  write_all(STDOUT_FILENO, text);
}

std::optional<int> ask(int argc, char** argv) {
  const std::string_view question = argc > 1 ? argv[1] : "";
  constexpr std::string_view kQuestions[] = {"status", "top", "stacks", "profile"};
  if (std::find(std::begin(kQuestions), std::end(kQuestions), question) == std::end(kQuestions))
    return std::nullopt;
  CLI::App app{"Asks a job that runs.", "cairn-run"};
  app.require_subcommand(1);
  std::string job, steps = "3";
  bool json = false, once = false;
  CLI::App& of_status = *app.add_subcommand(
      "status", "Each rank's step, what it is in and since when, its time and memory");
  CLI::App& of_top = *app.add_subcommand("top", "The same each second, with the loss's curve");
  CLI::App& of_stacks = *app.add_subcommand("stacks", "Where each thread of each rank stands");
  CLI::App& of_profile = *app.add_subcommand(
      "profile", "Has each rank's run trace some steps, as --profile does from the start");
  for (CLI::App* one : {&of_status, &of_top, &of_stacks, &of_profile})
    one->add_option("JOB", job, kJob);
  of_status.add_flag("--json", json, "As JSON, for scripts");
  of_top.add_flag("--once", once, "One picture, and the end");
  of_profile.add_option("--steps", steps, "The next N, or FIRST:LAST (default 3)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print(app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UsageError(command_line::explain(app, error));
  }
  if (of_status) return status(job, json);
  if (of_top) return top(job, once);
  if (of_profile) return profile(one_job(job), steps);
  print(stacks_of(one_job(job)));
  return 0;
}

}  // namespace cairn::run
