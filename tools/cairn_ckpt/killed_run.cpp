#include "killed_run.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "cairn/core/error.h"

namespace cairn::tools {

namespace {

constexpr auto kPoll = std::chrono::milliseconds(5);

[[noreturn]] void fail_start(const std::string& what, int reason) {
  core::fail<core::IoError>("prove-resume", "expected to start '", what,
                            "', got: ", std::strerror(reason));
}

// Returns only where exec fails; the parent learns why by the pipe.
void become(const std::vector<std::string>& command, int log, int failed) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  const int reason = errno;
  if (write(failed, &reason, sizeof reason) < 0) _exit(126);
  _exit(127);
}

pid_t start(const std::vector<std::string>& command, const std::string& log) {
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) fail_start(log, errno);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail_start(command[0], errno);
  const pid_t child = fork();
  if (child == 0) become(command, file, ends[1]);
  const int forking = errno;
  close(file);
  close(ends[1]);
  int reason = 0;
  const bool failed = child < 0 || read(ends[0], &reason, sizeof reason) > 0;
  close(ends[0]);
  if (!failed) return child;
  if (child > 0) waitpid(child, nullptr, 0);
  fail_start(command[0], child < 0 ? forking : reason);
}

std::vector<pid_t> children() {
  std::ifstream list("/proc/self/task/" + std::to_string(getpid()) + "/children");
  std::vector<pid_t> all;
  for (pid_t pid = 0; list >> pid;) all.push_back(pid);
  return all;
}

// What lost its parent became this process's child.
void kill_the_rest() {
  while (true) {
    for (const pid_t pid : children()) kill(pid, SIGKILL);
    if (waitpid(-1, nullptr, 0) < 0 && errno == ECHILD) return;
  }
}

}  // namespace

RunResult run_until(const std::vector<std::string>& command, const std::string& log,
                    const std::function<bool()>& must_die) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t child = start(command, log);
  RunResult result;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (!result.killed && must_die()) {
      result.killed = kill(-child, SIGKILL) == 0;
    }
    std::this_thread::sleep_for(kPoll);
  }
  kill_the_rest();
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

}  // namespace cairn::tools
