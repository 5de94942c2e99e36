#include "launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <list>
#include <optional>
#include <set>
#include <utility>

#include "output.h"
#include "process.h"
#include "saving_folder.h"

namespace cairn::run {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEndingPollMs = 20;
constexpr auto kLastWait = std::chrono::seconds(3);  // for processes to vanish after SIGKILL
constexpr std::size_t kTurn = 64 * 1024;  // bytes read of a stream before others have their turn
constexpr std::size_t kMostInAPipe = 1024 * 1024;  // as large as Linux makes one

struct Rank {
  int rank = 0;
  Child child;
  RankOutput out;
  RankOutput err;
  Tail tail;
  int log = -1;
  std::string log_path;
  bool running = true;
};

constexpr int kOutputLost = 74;  // sysexits.h: EX_IOERR

/// That of a rank whose training state a signal had it save (checkpointing::kSavedOnSignal).
constexpr int kSavedOnSignal = 75;

int exit_status_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string describe(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return "exit status " + std::to_string(WEXITSTATUS(wait_status));
  const int number = WTERMSIG(wait_status);
  return "signal " + std::to_string(number) + " (" + strsignal(number) + ")";
}

/// Both streams of cairn-run are one: text for them must keep its order.
bool share_a_file() {
  struct stat out {};
  struct stat err {};
  return fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
         out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

int open_file(const std::string& path, int flags) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666);
  if (fd < 0) throw std::runtime_error("cannot write '" + path + "': " + std::strerror(errno));
  return fd;
}

/// Makes the log folder; returns the file for what the screen gets, or -1.
int open_screen_log(const Options& options) {
  if (options.log_dir.empty()) return -1;
  std::error_code error;
  std::filesystem::create_directories(options.log_dir, error);
  if (error) {
    throw std::runtime_error("cannot create the log folder '" + options.log_dir +
                             "': " + error.message());
  }
  return options.tee ? open_file(options.log_dir + "/screen.log", O_TRUNC) : -1;
}

/// Signals are read from the descriptor that this returns. Those that were ignored when cairn-run
/// began stay ignored; a broken pipe is an error of write() alone.
int watch_signals() {
  signal(SIGCHLD, SIG_DFL);  // ignored children would leave no exit status
  sigset_t set;
  sigemptyset(&set);
  for (const int number :
       {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP}) {
    if (!is_ignored(number)) sigaddset(&set, number);
  }
  const int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  sigaddset(&set, SIGPIPE);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  return fd;
}

class Launcher {
 public:
  explicit Launcher(LaunchedJob job)
      : job_(std::move(job)),
        family_("CAIRN_RUN_ID=" + job_.id, saving_.path()),
        log_(open_screen_log(job_.options)),
        out_(STDOUT_FILENO, room_, log_) {
    job_.saving_folder = saving_.path();
    if (!share_a_file()) own_err_.emplace(STDERR_FILENO, room_, log_);
  }
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  int run();

 private:
  Screen& err() { return own_err_ ? *own_err_ : out_; }
  void say(const std::string& text);
  void note_lost(const std::string& where, int reason);
  void pass_on(int signal_number);
  void stop();
  std::string log_path(int rank) const;
  int open_log(int rank) const;
  void start(int local_rank);
  void run_once();
  void wait_for_events();
  void read_stream(Rank& rank, int& fd, RankOutput& output, std::size_t most);
  void read_rank(Rank& rank, std::size_t most);
  void read_ranks();
  void take_signals();
  void reap();
  void finish(Rank& rank, int wait_status);
  void show_failure(const Rank& rank, int wait_status);
  void begin_ending(int status);
  void signal_all(int signal_number) const;
  std::vector<Process> members() const;
  bool is_grace_over();
  void kill_all();
  bool proceed();
  bool may_restart() const;
  void restart();
  void end_output();
  void flush();
  int running() const;

  LaunchedJob job_;
  int signals_ = watch_signals();
  int room_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // a screen has room again, or is empty
  SavingFolder saving_;
  Family family_;  // before the screens' threads: it forks
  int log_;
  Screen out_;
  std::optional<Screen> own_err_;
  std::list<Rank> ranks_;
  int status_ = 0;
  bool output_lost_ = false;
  bool interrupted_ = false;  // asked to end by a signal
  int saved_ = 0;             // ranks that ended with kSavedOnSignal
  std::optional<Clock::time_point> ending_since_;
  Clock::time_point saving_at_;  // a rank was seen to save
  std::optional<Clock::time_point> killing_since_;
};

Launcher::~Launcher() {
  signal_all(SIGKILL);  // nothing is left here unless an exception is on its way
}

/// A message of cairn-run's own, on a line of its own.
void Launcher::say(const std::string& text) {
  out_.start_line();
  err().start_line();
  err().write("cairn-run: " + text);
}

/// Once: on a full disk every line would tell. A reader who went wanted no more.
void Launcher::note_lost(const std::string& where, int reason) {
  if (reason == 0 || reason == EPIPE || output_lost_) return;
  output_lost_ = true;
  say("output is lost: cannot write " + where + ": " + std::strerror(reason) + "\n");
}

std::string Launcher::log_path(int rank) const {
  return job_.options.log_dir + "/rank_" + std::to_string(rank) + ".log";
}

int Launcher::open_log(int rank) const {
  if (job_.options.log_dir.empty()) return -1;
  const std::string path = log_path(rank);
  if (job_.restarts == 0) return open_file(path, O_TRUNC);
  const int fd = open_file(path, O_APPEND);
  write_all(fd, "cairn-run: restart " + std::to_string(job_.restarts) + "\n");
  return fd;
}

void Launcher::start(int local_rank) {
  const int rank = job_.options.rank(local_rank);
  const bool terminal = rank == 0 && isatty(STDOUT_FILENO) && isatty(STDERR_FILENO);
  const bool plain = terminal || job_.options.world_size() == 1;
  const std::string prefix = plain ? "" : "[rank " + std::to_string(rank) + "] ";
  const int log = open_log(rank);
  const Child child = spawn(job_.options.command, environment_of(job_, local_rank), terminal);
  ranks_.push_back({rank,
                    child,
                    RankOutput(out_, prefix),
                    RankOutput(err(), prefix),
                    {},
                    log,
                    "'" + log_path(rank) + "'"});
}

/// Reads what is there, up to about `most` bytes; closes a stream that has ended.
void Launcher::read_stream(Rank& rank, int& fd, RankOutput& output, std::size_t most) {
  std::array<char, 16384> buffer;
  for (std::size_t total = 0; total < most;) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {  // EOF, or EIO from a terminal nobody holds any more
      close(fd);
      fd = -1;
      return;
    }
    // A terminal gives less than asked though it has more: only EAGAIN says that all is read.
    const std::string_view text(buffer.data(), static_cast<std::size_t>(got));
    output.add(text);
    rank.tail.add(text);
    if (rank.log >= 0) note_lost(rank.log_path, write_all(rank.log, text));
    total += text.size();
  }
}

void Launcher::read_rank(Rank& rank, std::size_t most) {
  if (rank.child.out >= 0) read_stream(rank, rank.child.out, rank.out, most);
  if (rank.child.err >= 0) read_stream(rank, rank.child.err, rank.err, most);
}

/// A turn: a bounded part of each stream whose screen has room, another rank first each time.
void Launcher::read_ranks() {
  ranks_.splice(ranks_.end(), ranks_, ranks_.begin());
  for (Rank& rank : ranks_) {
    if (rank.child.out >= 0 && rank.out.has_room()) {
      read_stream(rank, rank.child.out, rank.out, kTurn);
    }
    if (rank.child.err >= 0 && rank.err.has_room()) {
      read_stream(rank, rank.child.err, rank.err, kTurn);
    }
  }
}

void Launcher::wait_for_events() {
  std::vector<pollfd> fds{{signals_, POLLIN, 0}, {room_, POLLIN, 0}};
  for (const Rank& rank : ranks_) {
    if (rank.child.out >= 0 && rank.out.has_room()) fds.push_back({rank.child.out, POLLIN, 0});
    if (rank.child.err >= 0 && rank.err.has_room()) fds.push_back({rank.child.err, POLLIN, 0});
  }
  poll(fds.data(), fds.size(), ending_since_ ? kEndingPollMs : -1);
  eventfd_t ignored = 0;
  eventfd_read(room_, &ignored);
}

void Launcher::take_signals() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == sizeof info) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;  // reap() looks at every turn
    if (number == SIGUSR1 || number == SIGUSR2 || number == SIGALRM) {
      pass_on(number);
      continue;
    }
    if (number == SIGTSTP) {
      stop();
      continue;
    }
    interrupted_ = true;
    if (ending_since_) {
      kill_all();  // asked twice: at once
      continue;
    }
    say(std::string(strsignal(number)) + ": ending " + std::to_string(running()) + " processes\n");
    begin_ending(128 + number);
  }
}

/// A scheduler's word to the program (Slurm's --signal=USR1@90), to each rank's own process.
void Launcher::pass_on(int signal_number) {
  say(std::string(strsignal(signal_number)) + ": passed on to " + std::to_string(running()) +
      " processes\n");
  for (const Rank& rank : ranks_) {
    if (rank.running) kill(rank.child.pid, signal_number);
  }
}

/// A shell's Ctrl-Z: this process's group alone gets it. Returns when the shell lets it go on.
void Launcher::stop() {
  signal_all(SIGSTOP);
  kill(getpid(), SIGSTOP);
  signal_all(SIGCONT);
}

void Launcher::reap() {
  int wait_status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
    for (Rank& rank : ranks_) {
      if (rank.running && rank.child.pid == pid) finish(rank, wait_status);
    }
  }
}

void Launcher::finish(Rank& rank, int wait_status) {
  rank.running = false;
  read_rank(rank, kMostInAPipe);  // though the screen may be full: the error is often at the end
  rank.out.finish();
  rank.err.finish();
  const int status = exit_status_of(wait_status);
  saved_ += status == kSavedOnSignal ? 1 : 0;
  if (status == kSavedOnSignal && !ending_since_) {
    interrupted_ = true;
    say("rank " + std::to_string(rank.rank) + " has saved its state, as a signal asked (status " +
        std::to_string(status) + "): ending\n");
    begin_ending(status);
  } else if (status != 0 && !ending_since_) {
    show_failure(rank, wait_status);
    begin_ending(status);
  } else if (running() == 0 && !ending_since_) {
    begin_ending(0);
  }
}

void Launcher::show_failure(const Rank& rank, int wait_status) {
  const auto lines = rank.tail.lines();
  std::string text = "rank " + std::to_string(rank.rank) + " (pid " +
                     std::to_string(rank.child.pid) + ") failed with " + describe(wait_status);
  text += lines.empty() ? "; it printed nothing\n" : "; its last lines:\n";
  for (const std::string& line : lines) text += "    " + line + "\n";
  if (running() > 0) text += "cairn-run: ending the other " + std::to_string(running()) + "\n";
  say(text);
}

void Launcher::begin_ending(int status) {
  status_ = status;
  ending_since_ = Clock::now();
  signal_all(SIGTERM);
}

std::vector<Process> Launcher::members() const {
  std::vector<pid_t> started;
  for (const Rank& rank : ranks_) {
    if (rank.running) started.push_back(rank.child.pid);
  }
  return family_.members(started);
}

/// Signals the group of each rank that runs, at one stroke, and then whoever is outside of them.
/// Each process gets the signal once.
void Launcher::signal_all(int signal_number) const {
  std::set<pid_t> groups;
  const std::vector<Process> all = members();
  for (const Rank& rank : ranks_) {
    if (!rank.running) continue;
    kill(-rank.child.pid, signal_number);
    groups.insert(rank.child.pid);
  }
  for (const Process& process : all) {
    if (!groups.contains(process.group)) kill(process.pid, signal_number);
  }
}

/// Whether to go on: false once every process of the job is gone, or will not go even now.
bool Launcher::proceed() {
  if (!ending_since_) return true;
  if (running() == 0 && members().empty()) return false;
  if (killing_since_ || is_grace_over()) kill_all();
  return !killing_since_ || Clock::now() < *killing_since_ + kLastWait;
}

/// The time in which a rank saves does not count, up to a limit.
bool Launcher::is_grace_over() {
  const auto now = Clock::now();
  const auto seconds = [](double s) { return std::chrono::duration<double>(s); };
  const auto grace = seconds(job_.options.grace_period);
  if (saving_.in_use()) saving_at_ = now;
  return now >= std::max(*ending_since_, saving_at_) + grace ||
         now >= *ending_since_ + grace + seconds(job_.options.save_grace);
}

void Launcher::kill_all() {
  if (!killing_since_) killing_since_ = Clock::now();
  signal_all(SIGKILL);
}

int Launcher::running() const {
  int count = 0;
  for (const Rank& rank : ranks_) count += rank.running;
  return count;
}

/// Starts all processes and returns when they are gone.
void Launcher::run_once() {
  for (int i = 0; i < job_.options.nproc_per_node; ++i) start(i);
  while (proceed()) {
    wait_for_events();
    take_signals();
    read_ranks();
    reap();
  }
  end_output();
  take_signals();  // one that came last must not be followed by a restart
  if (interrupted_ && saved_ == static_cast<int>(ranks_.size())) status_ = kSavedOnSignal;
}

/// The last output of processes that the ranks left behind.
void Launcher::end_output() {
  for (Rank& rank : ranks_) {
    read_rank(rank, kMostInAPipe);
    rank.out.finish();
    rank.err.finish();
    for (const int fd : {rank.child.out, rank.child.err, rank.log}) {
      if (fd >= 0) close(fd);
    }
  }
}

bool Launcher::may_restart() const {
  return status_ != 0 && !interrupted_ && job_.restarts < job_.options.max_restarts;
}

void Launcher::restart() {
  renew(job_);
  ranks_.clear();
  status_ = saved_ = 0;
  ending_since_.reset();
  killing_since_.reset();
  say("restart " + std::to_string(job_.restarts) + " of " +
      std::to_string(job_.options.max_restarts) + "\n");
}

/// Waits for the reader of cairn-run's output. A signal ends that, and so does time where a signal
/// has ended the job.
void Launcher::flush() {
  const auto give_up = Clock::now() + kLastWait;
  while (!out_.empty() || !err().empty()) {
    if (interrupted_ && Clock::now() >= give_up) return;
    std::array<pollfd, 2> fds{{{signals_, POLLIN, 0}, {room_, POLLIN, 0}}};
    poll(fds.data(), fds.size(), interrupted_ ? kEndingPollMs : -1);
    eventfd_t ignored = 0;
    eventfd_read(room_, &ignored);
    signalfd_siginfo info;
    while (read(signals_, &info, sizeof info) == sizeof info) {
      if (info.ssi_signo == SIGINT || info.ssi_signo == SIGTERM || info.ssi_signo == SIGHUP ||
          info.ssi_signo == SIGQUIT)
        return;
    }
  }
}

int Launcher::run() {
  run_once();
  while (may_restart()) {
    restart();
    run_once();
  }
  flush();
  for (const Screen* screen : {&out_, &err()}) note_lost("standard output", screen->lost());
  flush();
  return status_ == 0 && output_lost_ ? kOutputLost : status_;
}

}  // namespace

int launch(const LaunchedJob& job) {
  adopt_orphans();
  return Launcher(job).run();
}

}  // namespace cairn::run
