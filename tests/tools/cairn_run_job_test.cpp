// Whole jobs under cairn-run: their ranks are this program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "shell.h"
#include "support/free_port.h"

namespace cairn::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kJobVariable = "CAIRN_TEST_JOB";  // the job's folder, in its ranks

/// The folder, in a rank of the job; nullptr: this is the test.
const char* job_folder() {
  return std::getenv("RANK") == nullptr ? nullptr : std::getenv(kJobVariable);
}

std::string this_program() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return std::filesystem::read_symlink("/proc/self/exe").string() +
         " --gtest_filter=" + info->test_suite_name() + "." + info->name();
}

void append(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text;
}

/// Two minutes at most.
bool wait_until(const std::function<bool()>& holds) {
  for (int i = 0; i < 6000 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(20));
  return holds();
}

/// What ps calls the states of a process's children.
std::string states_of_children(pid_t parent) {
  std::string states;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    if (std::atoi(entry.path().filename().c_str()) == 0) continue;
    const std::string stat = read_text(entry.path() / "stat");
    const std::size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos) continue;
    if (std::atoi(stat.c_str() + name_end + 4) == parent) states += stat[name_end + 2];
  }
  return states;
}

/// A cairn-run, of this program if nothing else is said; what it writes lies in a file.
class Launched {
 public:
  Launched(const TemporaryFolder& folder, const std::string& output, const std::string& options,
           const std::string& program = this_program())
      : output_(folder / output) {
    const std::string command = "exec " CAIRN_RUN_PROGRAM " " + options + " " + program + " >>" +
                                output_.string() + " 2>&1";
    pid_ = fork();
    if (pid_ != 0) return;
    setenv(kJobVariable, folder.string().c_str(), 1);
    setenv("CAIRN_JOB_TOKEN", "0123456789abcdef0123456789abcdef", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  ~Launched() {
    if (pid_ > 0) end(SIGKILL);
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  void signal(int number) const { kill(pid_, number); }
  /// What ps calls it: 'S' sleeps, 'T' is stopped.
  char state() const {
    const std::string stat = read_text("/proc/" + std::to_string(pid_) + "/stat");
    return stat.at(stat.rfind(')') + 2);
  }
  int end(int number) {
    signal(number);
    return wait();
  }
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string output() const { return read_text(output_); }
  pid_t pid() const { return pid_; }

 private:
  std::filesystem::path output_;
  pid_t pid_ = -1;
};

/// Meets the other ranks again and again, until the folder has a file "end".
void meet(const std::filesystem::path& folder) {
  const auto group = parallel::ProcessGroup::from_environment(
      {.timeout = seconds(20), .heartbeat_timeout = seconds(3), .rendezvous_timeout = seconds(60)});
  const auto met = folder / ("met_" + std::to_string(group.rank()));
  for (int i = 0; group.all_reduce_max(std::filesystem::exists(folder / "end") ? 1 : 0) == 0; ++i) {
    if (i == 0) append(met, "x");
    std::this_thread::sleep_for(milliseconds(10));
  }
}

// Each launcher counts its own restarts, from 0 when it is started again itself.
TEST(CairnRunJob, ANodeWhoseLauncherIsStartedAgainRejoins) {
  if (const char* folder = job_folder()) return meet(folder);
  const TemporaryFolder folder;
  const std::string port = std::to_string(free_port());
  const auto node = [&](int rank) {  // loopback by a name that cairn-run does not know as such
    return "--nnodes 2 --node-rank " + std::to_string(rank) +
           " --master-addr 0x7f000001 --max-restarts 3 --master-port " + port;
  };
  const auto met = [&](std::size_t times) {
    return wait_until([&] {
      return read_text(folder / "met_0").size() >= times &&
             read_text(folder / "met_1").size() >= times;
    });
  };
  Launched first(folder, "first", node(0));
  Launched second(folder, "second", node(1));
  ASSERT_TRUE(met(1)) << first.output() << second.output();
  EXPECT_EQ(second.end(SIGKILL), 128 + SIGKILL);
  Launched again(folder, "again", node(1));
  EXPECT_TRUE(met(2)) << first.output() << again.output();
  append(folder / "end", "");
  EXPECT_EQ(first.wait(), 0) << first.output();
  EXPECT_EQ(again.wait(), 0) << again.output();
  EXPECT_THAT(first.output(), HasSubstr("restart 1 of 3"));
  EXPECT_THAT(again.output(), Not(HasSubstr("restart")));
}

/// In a rank it takes its time to be saved: longer than the grace.
struct SlowState : Stateful {
  StateDict state_dict() const override {
    if (!begun.empty()) {
      append(begun, "x");
      std::this_thread::sleep_for(milliseconds(1200));
    }
    StateDict state;
    state.set("value", Tensor::full({3}, 7.0));
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    loaded = state.tensor("value").to_vector();
  }
  std::filesystem::path begun;  // a file, in a rank
  std::vector<double> loaded;
};

/// A rank that saves when this signal comes, and does not mind SIGTERM otherwise.
void step_until(int signal_number, const std::filesystem::path& folder) {
  signal(SIGTERM, SIG_IGN);
  const auto group = parallel::ProcessGroup::from_environment();
  SlowState slow;
  slow.begun = folder / "begun";
  checkpointing::TrainingState state({{"slow", slow}}, group.world());
  state.save_on_signal(signal_number, folder / "saved");
  append(folder / "ready", "x");
  for (int step = 1;; ++step) {
    state.end_on_signal(step);
    std::this_thread::sleep_for(milliseconds(5));
  }
}

/// cairn-run gets the signal and, while its ranks save, another one where that is not 0.
void check_saved(int signal_number, int meanwhile) {
  if (const char* folder = job_folder()) return step_until(signal_number, folder);
  const TemporaryFolder folder;
  Launched job(folder, "output", "--nproc-per-node 2 --grace-period 0.5");
  const auto both = [&](const char* file) {
    return wait_until([&] { return read_text(folder / file).size() == 2; });
  };
  ASSERT_TRUE(both("ready")) << job.output();
  job.signal(signal_number);
  if (meanwhile != 0) {
    ASSERT_TRUE(both("begun")) << job.output();
    job.signal(meanwhile);
  }
  EXPECT_EQ(job.wait(), checkpointing::kSavedOnSignal) << job.output();
  SlowState slow;
  ASSERT_TRUE(
      checkpointing::TrainingState({{"slow", slow}}).resume_latest((folder / "saved").string()));
  EXPECT_EQ(slow.loaded, std::vector<double>(3, 7.0));
}

// The others, who have saved, are not killed either.
TEST(CairnRunJob, ARankThatSavesIsWaitedFor) {
  check_saved(SIGTERM, 0);
}
TEST(CairnRunJob, RanksThatSaveOnAUsersSignalAreWaitedFor) {
  check_saved(SIGUSR1, 0);
}
// Slurm's --signal=USR1@90, of which 90 s were not enough.
TEST(CairnRunJob, RanksThatSaveOnAUsersSignalAreWaitedForWhenTheEndComes) {
  check_saved(SIGUSR1, SIGTERM);
}

/// A process that ignores SIGTERM and holds a file of cairn-run's as one that saves does.
std::string holder(const std::string& lock) {
  return " sh -c 'trap \"\" TERM; exec 9>$CAIRN_SAVING_FOLDER/x; " + lock +
         "echo $CAIRN_SAVING_FOLDER; kill -TERM $PPID; sleep 300'";
}

TEST(CairnRunJob, ASaveThatDoesNotEndIsNotWaitedForForEver) {
  for (const std::string lock : {"flock 9; ", ""}) {  // the second holds nothing
    const std::string limit = lock.empty() ? "" : " --save-grace 0.5";
    const ShellResult result =
        shell(CAIRN_RUN_PROGRAM " --grace-period 0.2" + limit + holder(lock));
    EXPECT_EQ(result.status, 128 + SIGTERM) << result.err;
    EXPECT_LT(result.seconds, 60);
    const std::string made = result.out.substr(0, result.out.find('\n'));
    EXPECT_THAT(made, HasSubstr("cairn_run_"));
    EXPECT_FALSE(std::filesystem::exists(made));
  }
}

// A shell's Ctrl-Z goes to cairn-run's process group alone.
TEST(CairnRunJob, StopsAndGoesOnAsAWhole) {
  const TemporaryFolder folder;
  Launched job(folder, "output", "--nproc-per-node 2",
               "sh -c 'while :; do echo x; sleep 0.02; done'");
  const auto grows = [&] {
    const std::size_t before = job.output().size();
    return wait_until([&] { return job.output().size() > before; });
  };
  ASSERT_TRUE(grows());
  for (int round = 0; round < 2; ++round) {
    job.signal(SIGTSTP);
    ASSERT_TRUE(wait_until([&] { return job.state() == 'T'; }));
    EXPECT_TRUE(wait_until([&] {  // 'D': waits for a child that was stopped before its exec
      const std::string states = states_of_children(job.pid());  // the guardian sleeps
      return std::ranges::count(states, 'T') + std::ranges::count(states, 'D') == 2;
    }));
    job.signal(SIGCONT);
    EXPECT_TRUE(grows());
  }
  EXPECT_EQ(job.end(SIGTERM), 128 + SIGTERM);
}

TEST(CairnRunJob, ALauncherThatIsKilledLeavesNoFolder) {
  const TemporaryFolder folder;
  const std::string path = (folder / "path").string();
  shell(CAIRN_RUN_PROGRAM " sh -c 'echo $CAIRN_SAVING_FOLDER > " + path + "; kill -KILL $PPID'");
  const std::string made = read_text(path).substr(0, read_text(path).find('\n'));
  EXPECT_THAT(made, HasSubstr("cairn_run_"));
  EXPECT_TRUE(wait_until([&] { return !std::filesystem::exists(made); }));
}

}  // namespace
}  // namespace cairn::test
