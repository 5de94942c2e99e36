// Real jobs with one fault each, drawn from a seed: what every rank says, and that nothing is left.
//
// CAIRN_FAULTS says how many; RC_PARAMS="seed=..." repeats a search; CAIRN_FAULT=N runs that one
// alone.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"
#include "fault.h"
#include "parallel/flight_record.h"
#include "place.h"
#include "rank.h"
#include "support/free_port.h"
#include "support/search.h"

namespace cairn::test {
namespace {

using std::chrono::milliseconds;

constexpr double kMostToSay = 10.0;   // seconds after the fault
constexpr double kMostToExit = 15.0;  // likewise
constexpr double kMostToStart = 30.0;
constexpr auto kBlink = milliseconds(700);
constexpr double kDoze = 4.5;  // longer than a heartbeat's timeout
constexpr int kSideBySide = 2;
constexpr const char* kFaultVariable = "CAIRN_TEST_FAULT";

const std::regex kSaysThatOutputIsLost("output is lost: cannot write .*: No space left");

/// What a rank wrote: a line of run_rank's.
struct Line {
  std::string word, text;
  std::int64_t time = 0;
};

#ifdef CAIRN_RUN_PROGRAM
constexpr const char* kLauncher = CAIRN_RUN_PROGRAM;
#else
constexpr const char* kLauncher = "";
#endif

const std::set<std::string> kWords{"at", "error", "ok", "wrong"};

std::vector<Line> lines_in(const std::string& output) {
  std::vector<Line> lines;
  std::istringstream in(output);
  for (std::string text; std::getline(in, text);) {
    Line line;
    if (text.starts_with("[rank ")) text.erase(0, text.find(' ', 6) + 1);  // cairn-run's
    if (text.starts_with(' ')) continue;                                   // its last lines, again
    std::istringstream words(text);
    words >> line.word >> line.time;
    if (words.fail() || !kWords.contains(line.word)) continue;
    std::getline(words >> std::ws, line.text);
    lines.push_back(line);
  }
  return lines;
}

/// Processes of the job, by the variable that all of them inherit.
std::vector<pid_t> processes_with(const std::string& variable) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ifstream file(entry.path() / "environ");
    for (std::string entry; std::getline(file, entry, '\0');) {
      if (entry == variable) found.push_back(pid);
    }
  }
  return found;
}

class Job {
 public:
  Job(const Fault& fault, bool namespaces)
      : fault_(fault),
        place_(namespaces, fault.engine == Engine::two_machines),
        variable_(core::str(kFaultVariable, '=', fault.pack())),
        port_(free_port()) {
    if (fault_.kind == FaultKind::lost_output) {  // /dev/full is a disk without room
      std::filesystem::create_directory(place_.folder() + "/logs");
      std::filesystem::create_symlink(
          "/dev/full", core::str(place_.folder(), "/logs/rank_", fault_.victim, ".log"));
    }
    if (namespaces && fault_.kind == FaultKind::full_disk && fault_.victim == 0) {
      place_.add_small_disk("checkpoints");
    }
    ranks_.resize(static_cast<std::size_t>(fault_.world));
    for (int rank = 0; rank < fault_.world; ++rank) start(rank);
  }
  ~Job() {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0 && rank.running) kill(rank.pid, SIGKILL), waitpid(rank.pid, nullptr, 0);
    }
    for (const int fd : strangers_) close(fd);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// What went wrong; empty: all was as expected.
  std::string run();
  /// What was expected and what each rank said.
  std::string report() const;

 private:
  struct Rank {
    pid_t pid = -1;
    bool running = true;
    int status = 0;
    std::int64_t ended = 0;
    std::string output;
  };
  std::string records() const { return place_.folder() + "/records"; }
  std::string path_of(int rank) const { return core::str(place_.folder(), "/rank_", rank); }
  std::string output_of(int rank) const {
    std::ifstream file(path_of(rank));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  double since_fault(std::int64_t time) const {
    return static_cast<double>(time - fault_time_) / 1e9;
  }
  bool loses_output(int rank) const {
    return fault_.kind == FaultKind::lost_output && rank == fault_.victim;
  }
  bool loses_log(int rank) const { return loses_output(rank) && fault_.seed % 2 == 0; }
  bool loses_screen(int rank) const { return loses_output(rank) && fault_.seed % 2 != 0; }
  bool is_late() const;
  void start(int rank);
  std::vector<std::string> command(int rank) const;
  void restart_launcher();
  [[noreturn]] void become(int rank, char* const* arguments, char* const* environment) const;
  void watch();
  void collect();
  bool all_ended() const;
  void inject();
  void wake();
  std::string judge(int rank) const;
  std::string judge_record() const;

  Fault fault_;
  Place place_;
  std::string variable_;
  int port_;
  std::vector<Rank> ranks_;
  std::vector<int> strangers_;
  std::int64_t started_ = nanoseconds_now(), fault_time_ = 0;
};

void Job::start(int rank) {
  const bool second = fault_.engine == Engine::two_machines && rank >= 2;
  const int local = fault_.engine == Engine::two_machines ? 2 : fault_.world;
  std::vector<std::string> own{variable_, "OMP_NUM_THREADS=1",
                               "CAIRN_FLIGHT_RECORDER=" + records()};
  if (!fault_.has_launchers()) {
    own.insert(
        own.end(),
        {core::str("RANK=", rank), core::str("WORLD_SIZE=", fault_.world),
         core::str("LOCAL_RANK=", second ? rank - 2 : rank), core::str("LOCAL_WORLD_SIZE=", local),
         core::str("MASTER_ADDR=", place_.master_addr()), core::str("MASTER_PORT=", port_)});
  }
  if (fault_.token) own.emplace_back("CAIRN_JOB_TOKEN=0123456789abcdef0123456789abcdef");
  if (fault_.engine == Engine::gloo) own.emplace_back("CAIRN_BACKEND=gloo");
  std::vector<char*> environment;
  for (std::string& text : own) environment.push_back(text.data());
  for (char** at = environ; *at != nullptr; ++at) environment.push_back(*at);
  environment.push_back(nullptr);
  std::vector<std::string> words = command(rank);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) become(rank, arguments.data(), environment.data());
  ranks_[static_cast<std::size_t>(rank)] = {.pid = pid};
}

std::vector<std::string> Job::command(int rank) const {
  const std::string program = "/proc/self/exe", filter = "--gtest_filter=Faults.EndAsTheyShould";
  if (!fault_.has_launchers()) return {program, filter};
  // Of one machine by a name that cairn-run does not know as loopback.
  const bool one = fault_.engine != Engine::two_machines;
  std::vector<std::string> words{kLauncher,
                                 "--nnodes",
                                 std::to_string(fault_.world),
                                 "--node-rank",
                                 std::to_string(rank),
                                 "--max-restarts",
                                 "3",
                                 "--master-addr",
                                 one ? "0x7f000001" : place_.master_addr(),
                                 "--master-port",
                                 std::to_string(port_)};
  if (loses_log(rank)) words.insert(words.end(), {"--log-dir", "logs"});
  words.insert(words.end(), {std::filesystem::read_symlink(program).string(), filter});
  return words;
}

void Job::become(int rank, char* const* arguments, char* const* environment) const {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (fault_.engine == Engine::two_machines && rank >= 2) place_.enter_second();
  const int fd = open(path_of(rank).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(loses_screen(rank) ? open("/dev/full", O_WRONLY) : fd, STDOUT_FILENO);
  dup2(fd, STDERR_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  if (chdir(place_.folder().c_str()) == 0) execve(arguments[0], arguments, environment);
  _exit(127);
}

void Job::collect() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    int status = 0;
    if (!rank.running || waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
    rank.running = false;
    rank.ended = nanoseconds_now();
    rank.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
}

/// A stopped rank ends by the harness's hand, when the others have ended.
bool Job::all_ended() const {
  for (int r = 0; r < fault_.world; ++r) {
    const bool stopped = fault_.kind == FaultKind::stop && r == fault_.victim;
    if (!stopped && ranks_[static_cast<std::size_t>(r)].running) return false;
  }
  return true;
}

bool Job::is_late() const {
  const auto now = nanoseconds_now();
  if (fault_time_ != 0) return since_fault(now) > kMostToExit + 5.0;
  return static_cast<double>(now - started_) / 1e9 > kMostToStart;
}

/// The faults that a rank cannot do itself.
void Job::inject() {
  if (fault_.kind == FaultKind::cut || fault_.kind == FaultKind::short_cut) place_.set_link(false);
  if (fault_.kind == FaultKind::short_cut) {
    std::this_thread::sleep_for(kBlink);
    place_.set_link(true);
  }
  if (fault_.kind == FaultKind::slow_link) place_.make_link_slow();
  if (fault_.kind == FaultKind::asked_to_save) {
    kill(ranks_[static_cast<std::size_t>(fault_.victim)].pid, SIGUSR1);
  }
  if (fault_.kind == FaultKind::restarted_launcher) restart_launcher();
  if (fault_.kind != FaultKind::stranger) return;
  std::string greeting(64, '\0');  // the beginning of ZeroMQ's handshake, and then nothing of it
  greeting[0] = '\xff', greeting[9] = '\x7f', greeting[10] = '\x03';
  for (const std::string& words : {std::string(), std::string(4096, 'x'), std::string(64, '\0'),
                                   greeting, greeting + std::string(500, '\x04')}) {
    for (const int fd : place_.knock(words)) strangers_.push_back(fd);
  }
}

/// Its guardian ends the rank.
void Job::restart_launcher() {
  std::this_thread::sleep_for(milliseconds(fault_.seed % 30));
  const pid_t pid = ranks_[static_cast<std::size_t>(fault_.victim)].pid;
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  start(fault_.victim);
}

void Job::wake() {
  const Rank& rank = ranks_[static_cast<std::size_t>(fault_.victim)];
  if (fault_.kind != FaultKind::doze || !rank.running || since_fault(nanoseconds_now()) < kDoze)
    return;
  kill(rank.pid, SIGCONT);
}

void Job::watch() {
  while (!all_ended() && !is_late()) {
    collect();
    std::this_thread::sleep_for(milliseconds(5));
    if (fault_time_ != 0) {
      wake();
      continue;
    }
    for (const Line& line : lines_in(output_of(fault_.victim))) {
      if (line.word == "at") fault_time_ = line.time;
    }
    if (fault_time_ != 0) inject();
  }
  for (Rank& rank : ranks_) {
    if (rank.running) kill(rank.pid, SIGKILL);
  }
  while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; })) {
    collect();
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (int r = 0; r < fault_.world; ++r) {
    ranks_[static_cast<std::size_t>(r)].output = output_of(r);
  }
}

std::string Job::judge(int r) const {
  const Rank& rank = ranks_[static_cast<std::size_t>(r)];
  std::string wrong;
  const auto complain = [&](const auto&... what) {
    wrong += core::str("rank ", r, " ", what...) + "\n";
  };
  if (rank.status != fault_.expected_status(r)) complain("has the status ", rank.status);
  if (fault_.expected_status(r) != 0 && !loses_output(r)) return wrong;
  if (loses_output(r) && !std::regex_search(rank.output, kSaysThatOutputIsLost))
    complain("does not say that its output is lost");
  if (since_fault(rank.ended) > kMostToExit)
    complain("ended after ", since_fault(rank.ended), " s");
  const std::string type = fault_.expected_type(r), text = fault_.expected(r);
  bool said = false, ok = false;
  for (const Line& line : lines_in(rank.output)) {
    if (line.word == "wrong") complain("says: ", line.text);
    if (line.word == "ok") ok = true;
    if (line.word != "error") continue;
    said = true;
    if (!line.text.starts_with(type + " [") || !std::regex_search(line.text, std::regex(text)) ||
        text.empty()) {
      complain("says: ", line.text);
    }
    if (since_fault(line.time) > kMostToSay) complain("spoke after ", since_fault(line.time), " s");
  }
  if (!text.empty() && !said) complain("said nothing");
  if (!fault_.breaks() && !ok) complain("did not go on");
  return wrong;
}

/// What torchfrtrace can tell of it; null: nothing, as of roots and names.
const char* kind_in_records(FaultKind kind) {
  switch (kind) {
    case FaultKind::kill:
    case FaultKind::stop:
    case FaultKind::leave:
    case FaultKind::give_up:
    case FaultKind::throws:
    case FaultKind::sleep:
      return "missing";
    case FaultKind::other_collective:
      return "type";
    case FaultKind::other_shape:
      return "size";
    case FaultKind::other_dtype:
      return "dtype";
    default:
      return nullptr;
  }
}

/// Whether torchfrtrace, where there is one, and the verdict beside the records say the same.
std::string Job::judge_record() const {
  const char* kind = kind_in_records(fault_.kind);
  if (kind == nullptr) return "";
  const auto torch = read_record(records())["torch"];
  if (torch.is_null()) return "";
  const auto& trouble = torch["trouble"];
  // Who goes at any moment leaves the collective before done on some ranks and not on others.
  const bool goes = kind == std::string("missing") && fault_.kind != FaultKind::sleep;
  if (goes && !trouble.empty() && trouble[0][0] == "state") return "";
  const auto own = own_verdict(records(), trouble.empty() ? 0 : trouble[0][1].get<std::uint64_t>());
  if (!own.is_array()) return core::str("the verdict is ", own.dump(), "\n");
  const auto sequence = own[1].get<std::uint64_t>();
  const auto theirs = torch_verdict(torch, sequence);
  std::vector<int> others;
  for (int rank = 0; rank < fault_.world; ++rank) {
    if (rank != fault_.victim) others.push_back(rank);
  }
  // Others may not have come yet when they hear of it.
  const auto& ranks = theirs[2];
  const bool among = goes && theirs[0] == kind && theirs[1] == sequence &&
                     std::find(ranks.begin(), ranks.end(), fault_.victim) != ranks.end();
  if (is_verdict(own, kind, sequence, fault_.victim, others) &&
      (among || is_verdict(theirs, kind, sequence, fault_.victim, others)))
    return "";
  return core::str("the verdict is ", own.dump(), ", torchfrtrace's ", theirs.dump(), "\n");
}

std::string Job::run() {
  watch();
  if (fault_time_ == 0) return "the fault was not reached\n";
  std::string wrong;
  for (int rank = 0; rank < fault_.world; ++rank) wrong += judge(rank);
  wrong += judge_record();
  for (const pid_t pid : processes_with(variable_))
    wrong += core::str("process ", pid, " is left\n");
  if (const std::string left = place_.leftovers(); !left.empty()) wrong += "left: " + left + "\n";
  if (fault_.kind == FaultKind::stranger && strangers_.empty()) wrong += "nobody knocked\n";
  if (fault_.kind == FaultKind::asked_to_save &&
      checkpointing::list_checkpoints(place_.folder() + "/checkpoints").empty()) {
    wrong += "nothing is saved\n";
  }
  return wrong;
}

std::string Job::report() const {
  std::string text;
  for (int r = 0; r < fault_.world; ++r) {
    const Rank& rank = ranks_[static_cast<std::size_t>(r)];
    const std::string expected = fault_.expected(r);
    text += core::str("  rank ", r, ": expected ",
                      fault_.expected_status(r) != 0 ? "its end"
                      : expected.empty()             ? "all well"
                                                     : fault_.expected_type(r) + " " + expected,
                      "; status ", rank.status, " after ", since_fault(rank.ended), " s\n");
    for (const Line& line : lines_in(rank.output)) {
      if (line.word == "at") continue;
      text += core::str("    ", since_fault(line.time), " s: ", line.word, ' ', line.text, '\n');
    }
  }
  return text;
}

/// In a thread of its own, whose namespaces end with it. Returns what went wrong.
std::string run_fault(int number, const Fault& fault, bool namespaces) {
  std::string wrong, report;
  std::thread([&] {
    try {
      Job job(fault, namespaces);
      wrong = job.run();
      report = job.report();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  }).join();
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::printf("%3d %s\n%s%s%s", number, fault.describe().c_str(), report.c_str(),
              wrong.empty() ? "" : "  WRONG: ", wrong.c_str());
  std::fflush(stdout);
  return wrong.empty() ? "" : core::str("fault ", number, ", ", fault.describe(), ": ", wrong);
}

TEST(Faults, EndAsTheyShould) {
  if (const char* packed = std::getenv(kFaultVariable)) {
    return run_rank(Fault::unpack(packed), number_in("RANK", 0));
  }
  const bool namespaces = may_have_namespaces();
  if (!namespaces) std::printf("no namespaces: one machine, and leftovers are not seen\n");
  const bool netem = namespaces && may_have_netem();
  if (!netem) std::printf("no netem: links are neither slow nor lossy\n");
  const std::uint64_t seed = search_seed();
  const int count = number_in("CAIRN_FAULTS", 12), only = number_in("CAIRN_FAULT", -1);
  std::printf("%d faults\n", count);
  const bool gpus = core::default_device().is_cuda();
  const std::string path = kLauncher;
  const bool launcher = !path.empty() && !(namespaces && path.starts_with("/tmp/"));  // hidden
  const std::vector<Fault> faults = draw_faults(count, seed, {namespaces, gpus, netem, launcher});
  std::atomic<int> next = 0;
  std::vector<std::string> wrong(faults.size());
  const auto work = [&] {
    for (int i = next++; i < count; i = next++) {
      if (only >= 0 && i != only) continue;
      const auto at = static_cast<std::size_t>(i);
      wrong[at] = run_fault(i, faults[at], namespaces);
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < kSideBySide; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

// Found by the search.

TEST(Faults, ADifferenceThatBothRanksPassIsNamed) {
  const Fault fault{FaultKind::other_root, Engine::shared_memory, 2, 1, 12, true, 7};
  EXPECT_EQ(run_fault(0, fault, may_have_namespaces()), "");
}

TEST(Faults, AProgramThatARankStartsHoldsNoneOfGloosSockets) {
  const Fault fault{FaultKind::child, Engine::gloo, 3, 1, 5, true, 7};
  EXPECT_EQ(run_fault(0, fault, may_have_namespaces()), "");
}

TEST(Faults, AMessageThatNeverComesIsTraced) {
  const Fault fault{FaultKind::lost_message, Engine::gloo, 4, 1, 5, true, 7};
  EXPECT_EQ(run_fault(0, fault, may_have_namespaces()), "");
}

/// On a GPU too: what the ranks' processes launch is not seen here. Last, as one that has used a
/// GPU cannot be forked.
TEST(Faults, TheTestedDeviceComputes) {
  const Tensor x = Tensor::full({3}, 2.0), y = Tensor::empty_like(x);
  kernels::binary(kernels::BinaryOp::add, x, x, y);
  EXPECT_EQ(y.to_vector(), std::vector<double>(3, 4.0));
}

}  // namespace
}  // namespace cairn::test
