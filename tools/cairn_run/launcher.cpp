#include "launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <list>
#include <optional>

#include "output.h"
#include "process.h"

namespace cairn::run {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEndingPollMs = 20;
constexpr auto kLastWait = std::chrono::seconds(3);  // for processes to vanish after SIGKILL

struct Rank {
  int rank = 0;
  Child child;
  RankOutput out;
  RankOutput err;
  Tail tail;
  int log = -1;
  bool running = true;
};

int exit_status_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string describe(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return "exit status " + std::to_string(WEXITSTATUS(wait_status));
  const int number = WTERMSIG(wait_status);
  return "signal " + std::to_string(number) + " (" + strsignal(number) + ")";
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // a full disk must not end the training
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

class Launcher {
 public:
  explicit Launcher(const Job& job) : job_(job) {}
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  int run();

 private:
  void watch_signals();
  void open_log_folder() const;
  int open_log(int rank) const;
  void start(int local_rank);
  void wait_for_events();
  bool read_stream(Rank& rank, int& fd, RankOutput& output);
  void read_rank(Rank& rank);
  void take_signals();
  void reap();
  void finish(Rank& rank, int wait_status);
  void show_failure(const Rank& rank, int wait_status);
  void begin_ending(int status);
  void signal_tree(int signal_number) const;
  bool proceed();
  int running() const;

  const Job& job_;
  Screen out_{STDOUT_FILENO};
  Screen err_{STDERR_FILENO};
  std::list<Rank> ranks_;
  int signals_ = -1;
  pid_t guardian_ = -1;
  int status_ = 0;
  std::optional<Clock::time_point> ending_since_;
  bool killing_ = false;
};

Launcher::~Launcher() {
  signal_tree(SIGKILL);  // nothing is left here unless an exception is on its way
  if (guardian_ > 0) {
    kill(guardian_, SIGKILL);
    waitpid(guardian_, nullptr, 0);
  }
}

void Launcher::watch_signals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&set, number);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

void Launcher::open_log_folder() const {
  if (job_.options.log_dir.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(job_.options.log_dir, error);
  if (error) {
    throw std::runtime_error("cannot create the log folder '" + job_.options.log_dir +
                             "': " + error.message());
  }
}

int Launcher::open_log(int rank) const {
  if (job_.options.log_dir.empty()) return -1;
  const std::string path = job_.options.log_dir + "/rank_" + std::to_string(rank) + ".log";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) throw std::runtime_error("cannot write '" + path + "': " + std::strerror(errno));
  return fd;
}

void Launcher::start(int local_rank) {
  const int rank = job_.options.rank(local_rank);
  const bool terminal = rank == 0 && isatty(STDOUT_FILENO) && isatty(STDERR_FILENO);
  const bool plain = terminal || job_.options.world_size() == 1;
  const std::string prefix = plain ? "" : "[rank " + std::to_string(rank) + "] ";
  const int log = open_log(rank);
  const Child child = spawn(job_.options.command, environment_of(job_, local_rank), terminal);
  ranks_.push_back({rank, child, RankOutput(out_, prefix), RankOutput(err_, prefix), {}, log});
}

/// Reads what is there. Returns false where the stream has ended; it is closed then.
bool Launcher::read_stream(Rank& rank, int& fd, RankOutput& output) {
  std::array<char, 16384> buffer;
  for (;;) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) break;  // EOF, or EIO from a terminal nobody holds any more
    const std::string_view text(buffer.data(), static_cast<std::size_t>(got));
    output.add(text);
    rank.tail.add(text);
    if (rank.log >= 0) write_all(rank.log, text);
    if (got < static_cast<ssize_t>(buffer.size())) return true;
  }
  close(fd);
  fd = -1;
  return false;
}

void Launcher::read_rank(Rank& rank) {
  if (rank.child.out >= 0) read_stream(rank, rank.child.out, rank.out);
  if (rank.child.err >= 0) read_stream(rank, rank.child.err, rank.err);
}

void Launcher::wait_for_events() {
  std::vector<pollfd> fds{{signals_, POLLIN, 0}};
  for (const Rank& rank : ranks_) {
    if (rank.child.out >= 0) fds.push_back({rank.child.out, POLLIN, 0});
    if (rank.child.err >= 0) fds.push_back({rank.child.err, POLLIN, 0});
  }
  poll(fds.data(), fds.size(), ending_since_ ? kEndingPollMs : -1);
}

void Launcher::take_signals() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == sizeof info) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;  // reap() looks at every turn
    if (ending_since_) {
      killing_ = true;  // asked twice: at once
      signal_tree(SIGKILL);
      continue;
    }
    err_.start_line();
    err_.write("cairn-run: " + std::string(strsignal(number)) + ": ending " +
               std::to_string(running()) + " processes\n");
    begin_ending(128 + number);
  }
}

void Launcher::reap() {
  int wait_status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
    if (pid == guardian_) guardian_ = -1;
    for (Rank& rank : ranks_) {
      if (rank.running && rank.child.pid == pid) finish(rank, wait_status);
    }
  }
}

void Launcher::finish(Rank& rank, int wait_status) {
  rank.running = false;
  read_rank(rank);
  rank.out.finish();
  rank.err.finish();
  const int status = exit_status_of(wait_status);
  if (status != 0 && !ending_since_) {
    show_failure(rank, wait_status);
    begin_ending(status);
  } else if (running() == 0 && !ending_since_) {
    begin_ending(0);
  }
}

void Launcher::show_failure(const Rank& rank, int wait_status) {
  const auto lines = rank.tail.lines();
  std::string text = "cairn-run: rank " + std::to_string(rank.rank) + " (pid " +
                     std::to_string(rank.child.pid) + ") failed with " + describe(wait_status);
  text += lines.empty() ? "; it printed nothing\n" : "; its last lines:\n";
  for (const std::string& line : lines) text += "    " + line + "\n";
  if (running() > 0) text += "cairn-run: ending the other " + std::to_string(running()) + "\n";
  out_.start_line();
  err_.start_line();
  err_.write(text);
}

void Launcher::begin_ending(int status) {
  status_ = status;
  ending_since_ = Clock::now();
  signal_tree(SIGTERM);
}

void Launcher::signal_tree(int signal_number) const {
  for (const Rank& rank : ranks_) {
    if (rank.running) kill(-rank.child.pid, signal_number);
  }
  for (pid_t pid : descendants(guardian_)) kill(pid, signal_number);
}

/// Whether to go on: false once every process of the job is gone, or will not go even now.
bool Launcher::proceed() {
  if (!ending_since_) return true;
  if (running() == 0 && descendants(guardian_).empty()) return false;
  const auto ending_for = Clock::now() - *ending_since_;
  const auto grace = std::chrono::duration<double>(job_.options.grace_period);
  if (killing_ || ending_for >= grace) {
    killing_ = true;
    signal_tree(SIGKILL);
  }
  return ending_for < grace + kLastWait;
}

int Launcher::running() const {
  int count = 0;
  for (const Rank& rank : ranks_) count += rank.running;
  return count;
}

int Launcher::run() {
  watch_signals();
  adopt_orphans();
  open_log_folder();
  guardian_ = start_guardian("CAIRN_RUN_ID=" + job_.run_id);
  for (int i = 0; i < job_.options.nproc_per_node; ++i) start(i);
  while (proceed()) {
    wait_for_events();
    take_signals();
    for (Rank& rank : ranks_) read_rank(rank);
    reap();
  }
  return status_;
}

}  // namespace

int launch(const Job& job) {
  return Launcher(job).run();
}

}  // namespace cairn::run
