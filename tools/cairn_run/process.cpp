#include "process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

namespace cairn::run {
namespace {

namespace fs = std::filesystem;

struct Pipe {
  int read = -1;
  int write = -1;
};

Pipe open_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw SpawnError(std::string("cannot open a pipe: ") + std::strerror(errno), 1);
  }
  return {ends[0], ends[1]};
}

/// A pseudo terminal that passes bytes unchanged: `read` is our side, `write` the process's.
Pipe open_terminal() {
  const int ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  char name[64];
  if (ours < 0 || grantpt(ours) != 0 || unlockpt(ours) != 0 ||
      ptsname_r(ours, name, sizeof name) != 0) {
    if (ours >= 0) close(ours);
    return {};
  }
  const int theirs = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (theirs < 0) {
    close(ours);
    return {};
  }
  termios mode{};
  if (tcgetattr(theirs, &mode) == 0) {
    mode.c_oflag &= ~static_cast<tcflag_t>(OPOST);
    mode.c_lflag &= ~static_cast<tcflag_t>(ECHO);
    tcsetattr(theirs, TCSANOW, &mode);
  }
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) ioctl(theirs, TIOCSWINSZ, &size);
  return {ours, theirs};
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  out.reserve(texts.size() + 1);
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

void unblock_signals() {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void run_child(char* const* command, char* const* environment, int out, int err,
                            int failure, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it ended before the line above
  unblock_signals();                  // what was ignored when cairn-run began stays ignored
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  if (null > STDERR_FILENO) close(null);
  execvpe(command[0], command, environment);
  const int error = errno;
  if (write(failure, &error, sizeof error) != sizeof error) _exit(126);
  _exit(127);
}

/// Waits until the child runs its program; throws where it could not.
void check_started(const std::string& program, pid_t pid, int failure) {
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(failure, &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  if (got != sizeof error) return;
  waitpid(pid, nullptr, 0);
  throw SpawnError("cannot start '" + program + "': " + std::strerror(error),
                   error == ENOENT ? 127 : 126);
}

struct Stat {
  pid_t parent = 0;
  pid_t group = 0;
  bool zombie = false;
};

/// /proc/PID/stat: "pid (name) state ppid pgrp ...", where name may hold anything.
bool read_stat(const fs::path& folder, Stat& stat) {
  std::ifstream file(folder / "stat");
  std::string text;
  std::getline(file, text, '\0');  // all of it; nothing where the process has just gone
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= text.size()) return false;
  stat.zombie = text[name_end + 2] == 'Z';
  char* after = nullptr;
  stat.parent = static_cast<pid_t>(std::strtol(text.c_str() + name_end + 4, &after, 10));
  stat.group = static_cast<pid_t>(std::strtol(after, nullptr, 10));
  return true;
}

template <class F>
void for_each_process(F&& f) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    const auto pid = static_cast<pid_t>(std::strtol(entry.path().filename().c_str(), nullptr, 10));
    if (pid > 0) f(pid, entry.path());
  }
}

bool has_marker(const fs::path& folder, const std::string& marker) {
  std::ifstream file(folder / "environ");
  std::string entry;
  while (std::getline(file, entry, '\0')) {
    if (entry.starts_with(marker)) return true;
  }
  return false;
}

int kill_marked(const std::string& marker) {
  int killed = 0;
  for_each_process([&](pid_t pid, const fs::path& folder) {
    if (pid != getpid() && has_marker(folder, marker)) killed += kill(pid, SIGKILL) == 0;
  });
  return killed;
}

[[noreturn]] void guard(int lifeline, const std::string& marker, const std::string& folder) {
  setsid();
  for (int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(signal_number, SIG_IGN);
  const int null = open("/dev/null", O_RDWR);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  char byte = 0;
  while (read(lifeline, &byte, 1) < 0 && errno == EINTR) {
  }
  for (int round = 0; round < 20 && kill_marked(marker) > 0; ++round) usleep(50'000);
  std::error_code ignored;
  if (!folder.empty()) fs::remove_all(folder, ignored);
  _exit(0);
}

}  // namespace

Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            bool terminal) {
  Child child;
  Pipe out = terminal ? open_terminal() : Pipe{};
  const bool one_stream = out.read >= 0;
  if (!one_stream) out = open_pipe();
  const Pipe err = one_stream ? out : open_pipe();
  const Pipe failure = open_pipe();
  const auto arguments = pointers(command);
  const auto variables = pointers(environment);
  const pid_t parent = getpid();
  child.pid = fork();
  if (child.pid < 0)
    throw SpawnError(std::string("cannot start a process: ") + std::strerror(errno), 1);
  if (child.pid == 0) {
    run_child(arguments.data(), variables.data(), out.write, err.write, failure.write, parent);
  }
  setpgid(child.pid, child.pid);  // here too: whoever comes first
  close(out.write);
  if (!one_stream) close(err.write);
  close(failure.write);
  child.out = out.read;
  child.err = one_stream ? -1 : err.read;
  for (int fd : {child.out, child.err}) {
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  check_started(command.front(), child.pid, failure.read);
  close(failure.read);
  return child;
}

void adopt_orphans() {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Family::Family(std::string marker, const std::string& folder) : marker_(std::move(marker)) {
  for_each_process([&](pid_t pid, const fs::path& folder) {
    Stat stat;
    if (read_stat(folder, stat) && stat.parent == getpid()) inherited_.push_back(pid);
  });
  const Pipe lifeline = open_pipe();  // its writing end is closed with this process, never before
  guardian_ = fork();
  if (guardian_ == 0) {
    close(lifeline.write);
    guard(lifeline.read, marker_, folder);
  }
  close(lifeline.read);
}

Family::~Family() {
  if (guardian_ < 0) return;
  kill(guardian_, SIGKILL);
  waitpid(guardian_, nullptr, 0);
}

/// A child that nobody here started is an orphan of the run's or of an inherited child's: where
/// there were such children, the marker tells.
bool Family::is_member(pid_t child, const std::vector<pid_t>& started) const {
  const auto in = [&](const std::vector<pid_t>& pids) {
    return std::find(pids.begin(), pids.end(), child) != pids.end();
  };
  if (child == guardian_) return false;
  if (in(started) || inherited_.empty()) return true;
  return !in(inherited_) && has_marker(fs::path("/proc") / std::to_string(child), marker_);
}

std::vector<Process> Family::members(const std::vector<pid_t>& started) const {
  std::multimap<pid_t, pid_t> children;
  std::map<pid_t, Stat> stats;
  for_each_process([&](pid_t pid, const fs::path& folder) {
    Stat stat;
    if (!read_stat(folder, stat)) return;
    children.emplace(stat.parent, pid);
    stats[pid] = stat;
  });
  const auto below = [&](pid_t parent) { return children.equal_range(parent); };
  std::vector<pid_t> found;
  for (auto [child, last] = below(getpid()); child != last; ++child) {
    if (is_member(child->second, started)) found.push_back(child->second);
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (auto [child, last] = below(found[i]); child != last; ++child) {
      found.push_back(child->second);
    }
  }
  std::vector<Process> members;
  for (const pid_t pid : found) {
    if (!stats[pid].zombie) members.push_back({pid, stats[pid].group});
  }
  return members;
}

bool is_ignored(int signal_number) {
  struct sigaction action {};
  sigaction(signal_number, nullptr, &action);
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace cairn::run
