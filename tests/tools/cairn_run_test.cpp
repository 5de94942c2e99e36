// cairn-run, run as a user runs it.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "machine.h"
#include "shell.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr const char* kLauncher = CAIRN_RUN_PROGRAM;

ShellResult cairn_run(const std::string& arguments) {
  return shell(std::string(kLauncher) + " " + arguments);
}

/// A sleep that no other process on this machine has, to find it by.
std::string unique_sleep() {
  static int counter = 0;
  return "sleep 60." + std::to_string(getpid()) + std::to_string(++counter);
}

bool is_running(const std::string& command) {
  std::string words = command;
  std::replace(words.begin(), words.end(), ' ', '\0');
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    if (read_text(entry.path() / "cmdline").starts_with(words)) return true;
  }
  return false;
}

bool ends_within(const std::string& command, double seconds) {
  for (int i = 0; i < static_cast<int>(seconds * 20); ++i) {
    if (!is_running(command)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return !is_running(command);
}

TEST(CairnRun, ExplainsItself) {
  const ShellResult result = cairn_run("--help");
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("PROGRAM [ARGS...]"), HasSubstr("--nproc-per-node"),
                                HasSubstr("--log-dir")));
}

TEST(CairnRun, RefusesBadCommandLinesInOneLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"--bogus true", "unknown flag '--bogus' (see cairn-run --help)"},
      {"--nproc_per_node=2 true", "'--nproc_per_node': did you mean --nproc-per-node?"},
      {"--nproc-per-node 0 true", "0"},
      {"--nproc-per-node many true", "many"},
      {"--nproc-per-node -2 true", "-2"},
      {"--master-port 70000 true", "70000"},
      {"--grace-period -1 true", "-1"},
      {"--nnodes 2 --node-rank 2 true", "--node-rank"},
      {"--nproc-per-node 5000 true", "5000"},
      {"--nnodes 2 --master-port 29500 true", "--master-addr"},
      {"--nnodes 2 --master-addr localhost --master-port 29500 true", "--master-addr"},
      {"--nnodes 2 --master-addr [::1] --master-port 29500 true", "--master-addr"},
      {"--nnodes 2 --master-addr 10.0.0.1 true", "--master-port"},
      {"--nnodes 2 --master-addr 10.0.0.1 --master-port 29500 true", "CAIRN_JOB_TOKEN"},
      {"--max-restarts -1 true", "-1"},
      {"--env NAME true", "NAME=VALUE"},
      {"--env =VALUE true", "NAME=VALUE"},
      {"--env RANK=1 true", "RANK"},
      {"--env CAIRN_JOB_TOKEN=x true", "CAIRN_JOB_TOKEN"},
      {"--tee true", "--log-dir"},
      {"--nproc-per-node 2", "no program"},
  };
  for (const auto& [arguments, named] : cases) {
    const ShellResult result = cairn_run(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(result.out, "") << arguments;
    EXPECT_THAT(result.err, AllOf(StartsWith("cairn-run: "), HasSubstr(named))) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(CairnRun, NamesAProgramThatCannotStart) {
  const ShellResult missing = cairn_run("--nproc-per-node 2 no-such-program-here");
  EXPECT_EQ(missing.status, 127);
  EXPECT_THAT(missing.err, HasSubstr("cannot start 'no-such-program-here'"));
  const ShellResult folder = cairn_run("/");
  EXPECT_EQ(folder.status, 126);
  EXPECT_THAT(folder.err, HasSubstr("cannot start '/'"));
}

TEST(CairnRun, SetsTheEnvironmentOfEachRank) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 sh -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE "
      "$GROUP_RANK $MASTER_ADDR; "
      "test ${#CAIRN_JOB_TOKEN} -ge 32 && test $MASTER_PORT -gt 0'");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 0] 0 0 2 2 0 127.0.0.1\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] 1 1 2 2 0 127.0.0.1\n"));
}

TEST(CairnRun, CountsRanksAcrossNodes) {
  const ShellResult result = shell(
      "CAIRN_JOB_TOKEN=secret " + std::string(kLauncher) +
      " --nproc-per-node 2 --nnodes 3 --node-rank 1 --master-addr 10.1.2.3 --master-port 29500 "
      "sh -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT "
      "$CAIRN_JOB_TOKEN'");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 2] 2 0 6 1 10.1.2.3 29500 secret\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 3] 3 1 6 1 10.1.2.3 29500 secret\n"));
}

TEST(CairnRun, DividesTheCoresUnlessTold) {
  const std::string share = std::to_string(std::max(1, run::Machine().cores() / 2));
  const std::string command =
      std::string(kLauncher) + " --nproc-per-node 2 sh -c 'echo threads $OMP_NUM_THREADS'";
  EXPECT_THAT(shell("unset OMP_NUM_THREADS; " + command).out,
              HasSubstr("[rank 1] threads " + share + "\n"));
  EXPECT_THAT(shell("OMP_NUM_THREADS=7 " + command).out, HasSubstr("[rank 1] threads 7\n"));
}

TEST(CairnRun, GivesEachJobItsOwnToken) {
  const char* print_token = "sh -c 'echo $CAIRN_JOB_TOKEN'";
  EXPECT_NE(cairn_run(print_token).out, cairn_run(print_token).out);
}

TEST(CairnRun, PassesTheProgramsOwnFlagsOn) {
  EXPECT_THAT(cairn_run("--nproc-per-node 1 echo --help --nproc-per-node 9 -x").out,
              "--help --nproc-per-node 9 -x\n");
  EXPECT_THAT(cairn_run("-- echo -n --bogus").out, "--bogus");
}

TEST(CairnRun, PrefixesLinesOfBothStreams) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 sh -c 'printf \"half \"; sleep 0.1; echo line; echo problem >&2; "
      "printf last'");
  EXPECT_EQ(result.status, 0);
  for (const char* rank : {"[rank 0] ", "[rank 1] "}) {
    EXPECT_THAT(result.out, HasSubstr(std::string(rank) + "half line\n"));
    EXPECT_THAT(result.out, HasSubstr(std::string(rank) + "last\n"));
    EXPECT_THAT(result.err, HasSubstr(std::string(rank) + "problem\n"));
  }
}

TEST(CairnRun, KeepsProgressBarsRedrawing) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 sh -c 'test $RANK = 1 || printf \"10%%\\r50%%\\r100%%\\r\\nend\\n\"'");
  EXPECT_EQ(result.out, "[rank 0] 10%\r[rank 0] 50%\r[rank 0] 100%\r\n[rank 0] end\n");
}

TEST(CairnRun, LeavesASingleProcessOutputAlone) {
  const ShellResult result = cairn_run("sh -c 'printf \"a\\rb\"; printf c >&2'");
  EXPECT_EQ(result.out, "a\rb");
  EXPECT_EQ(result.err, "c");
}

TEST(CairnRun, PassesLongOutputWhole) {
  const ShellResult result = cairn_run("--nproc-per-node 2 sh -c 'seq 1 20000'");
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 40000);
  EXPECT_THAT(result.out, HasSubstr("[rank 1] 20000\n"));
}

TEST(CairnRun, WritesALogFileForEachRank) {
  const TemporaryFolder folder;
  const ShellResult result = cairn_run("--nproc-per-node 2 --log-dir " + (folder / "a/b").string() +
                                       " sh -c 'echo out $RANK; echo err $RANK >&2'");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(read_text(folder / "a/b/rank_0.log"),
              AllOf(HasSubstr("out 0\n"), HasSubstr("err 0\n"), Not(HasSubstr("1"))));
  EXPECT_THAT(read_text(folder / "a/b/rank_1.log"),
              AllOf(HasSubstr("out 1\n"), HasSubstr("err 1\n")));
}

TEST(CairnRun, NamesALogFolderThatCannotBe) {
  const ShellResult result = cairn_run("--log-dir /dev/null/logs true");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("/dev/null/logs"));
}

TEST(CairnRun, PassesTheFirstFailureOn) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 3 sh -c 'seq 1 100; test $RANK = 1 || exec sleep 60; echo the reason "
      ">&2; exit 42'");
  EXPECT_EQ(result.status, 42);
  EXPECT_LT(result.seconds, 5.0);
  EXPECT_THAT(result.err, HasSubstr("rank 1 "));
  EXPECT_THAT(result.err, HasSubstr("failed with exit status 42; its last lines:\n"));
  EXPECT_THAT(result.err, HasSubstr("    100\n    the reason\n"));
  EXPECT_THAT(result.err, Not(HasSubstr("    50\n")));
  EXPECT_THAT(result.err, EndsWith("cairn-run: ending the other 2\n"));
}

TEST(CairnRun, ReportsSignalsAsShellsDo) {
  const ShellResult result =
      cairn_run("--nproc-per-node 2 sh -c 'test $RANK = 0 || kill -KILL $$; exec sleep 60'");
  EXPECT_EQ(result.status, 128 + 9);
  EXPECT_THAT(result.err, HasSubstr("rank 1 "));
  EXPECT_THAT(result.err, HasSubstr("signal 9 (Killed)"));
}

TEST(CairnRun, EndsGrandchildrenThatRefuse) {
  const std::string sleep = unique_sleep();
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 --grace-period 0.5 sh -c 'test $RANK = 0 && { sleep 0.3; exit 5; }; "
      "trap \"\" TERM; setsid " +
      sleep + "'");
  EXPECT_EQ(result.status, 5);
  EXPECT_GT(result.seconds, 0.5);
  EXPECT_LT(result.seconds, 5.0);
  EXPECT_FALSE(is_running(sleep));
}

TEST(CairnRun, LeavesNoBackgroundProcessAfterSuccess) {
  const std::string sleep = unique_sleep();
  const ShellResult result =
      cairn_run("--nproc-per-node 2 sh -c '" + sleep + " & setsid " + sleep + " & echo started'");
  EXPECT_EQ(result.status, 0);
  EXPECT_LT(result.seconds, 5.0);
  EXPECT_FALSE(is_running(sleep));
}

TEST(CairnRun, EndsTheJobOnInterrupt) {
  const std::string sleep = unique_sleep();
  const ShellResult result = shell("timeout --preserve-status -s INT 0.5 " +
                                   std::string(kLauncher) + " --nproc-per-node 2 " + sleep);
  EXPECT_EQ(result.status, 128 + 2);
  EXPECT_THAT(result.err, HasSubstr("cairn-run: Interrupt: ending 2 processes\n"));
  EXPECT_LT(result.seconds, 5.0);
  EXPECT_FALSE(is_running(sleep));
}

// What a scheduler tells its job ahead of the end: the program's own to act upon.
TEST(CairnRun, PassesUserSignalsOn) {
  for (const std::string name : {"USR1", "USR2", "ALRM"}) {
    const TemporaryFolder dir;
    std::ofstream(dir / "rank.sh")
        << "trap 'echo got it; exit 0' " << name << "\ncd '" << dir.string() << "'\ntouch $RANK\n"
        << "until [ -e 0 ] && [ -e 1 ]; do sleep 0.05; done\n"
        << "[ $RANK = 1 ] || kill -" << name << " $PPID\nwhile :; do sleep 0.05; done\n";
    const ShellResult result =
        cairn_run("--nproc-per-node 2 bash '" + (dir / "rank.sh").string() + "'");
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("[rank 0] got it"), HasSubstr("[rank 1] got it")));
    EXPECT_THAT(result.err, HasSubstr("passed on to 2 processes"));
  }
}

TEST(CairnRun, RaisesTheLimitOfDescriptors) {
  const ShellResult result =
      shell("ulimit -S -n 60; " + std::string(kLauncher) + " bash -c 'ulimit -S -n'; ulimit -H -n");
  const std::string first = result.out.substr(0, result.out.find('\n'));
  EXPECT_EQ(result.out, first + "\n" + first + "\n");
}

TEST(CairnRun, LeavesNothingWhenItIsKilled) {
  const std::string sleep = unique_sleep();
  const ShellResult result =
      shell("timeout --preserve-status -s KILL 0.5 " + std::string(kLauncher) +
            " --nproc-per-node 2 sh -c '" + sleep + " & setsid " + sleep + "'");
  EXPECT_EQ(result.status, 128 + 9);
  EXPECT_TRUE(ends_within(sleep, 5.0));
}

/// Listens at a port of the loopback interface until it goes.
class TakenPort {
 public:
  TakenPort() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    number_ = std::to_string(ntohs(address.sin_port));
  }
  ~TakenPort() { close(fd_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  const std::string& number() const { return number_; }

 private:
  int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string number_;
};

TEST(CairnRun, NamesAPortInUse) {
  const TakenPort port;
  const ShellResult result = cairn_run("--master-port " + port.number() + " true");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("port " + port.number()), HasSubstr("in use"),
                                HasSubstr("--master-port")));
}

// Of the processes of a cairn-run that was killed and is started again, say.
TEST(CairnRun, WaitsForAPortThatIsFreeSoon) {
  std::optional<TakenPort> port(std::in_place);
  const std::string command = "--master-port " + port->number() + " true";
  std::thread others([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    port.reset();
  });
  EXPECT_EQ(cairn_run(command).status, 0);
  others.join();
}

TEST(CairnRun, SaysWhatAnEmptyTokenLacks) {
  const ShellResult result = shell("CAIRN_JOB_TOKEN= " + std::string(kLauncher) +
                                   " --nnodes 2 --master-addr 10.0.0.1 --master-port 29500 true");
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("CAIRN_JOB_TOKEN"), HasSubstr("it is empty")));
}

TEST(CairnRun, NeverRepeatsATokenFromTheCommandLine) {
  const ShellResult result = cairn_run("--env CAIRN_JOB_TOKEN=hunter2 true");
  EXPECT_THAT(result.err, Not(HasSubstr("hunter2")));
}

TEST(CairnRun, SetsVariablesForTheProcesses) {
  const ShellResult result = cairn_run(
      "--env FIRST=1 --env 'SECOND=a=b c' --env OMP_NUM_THREADS=9 sh -c 'echo $FIRST $SECOND "
      "$OMP_NUM_THREADS'");
  EXPECT_EQ(result.out, "1 a=b c 9\n") << result.err;
}

TEST(CairnRun, CountsProcessesByWhatTheMachineHas) {
  const auto count = [](const std::string& devices, const std::string& how) {
    return shell("CUDA_VISIBLE_DEVICES=" + devices + " " + kLauncher + " --nproc-per-node " + how +
                 " sh -c 'test $RANK != 0 || echo $WORLD_SIZE'");
  };
  EXPECT_THAT(count("0,1", "gpu").out, HasSubstr("2\n"));
  EXPECT_THAT(count("4,5,7", "auto").out, HasSubstr("3\n"));
  EXPECT_THAT(count("", "auto").out,
              HasSubstr(std::to_string(run::Machine().memory_nodes()) + "\n"));
  EXPECT_THAT(count("0", "cpu").out, HasSubstr(std::to_string(run::Machine().cores()) + "\n"));
  const ShellResult none = count("", "gpu");
  EXPECT_EQ(none.status, 2);
  EXPECT_THAT(none.err, HasSubstr("CUDA_VISIBLE_DEVICES"));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(CairnRun, StartsAgainAfterAFailure) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 --max-restarts 3 sh -c 'echo $CAIRN_RESTART_COUNT $RANK; test $RANK = 0 "
      "|| test $CAIRN_RESTART_COUNT = 2 || exit 4'");
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* line :
       {"[rank 1] 0 1\n", "[rank 1] 1 1\n", "[rank 0] 2 0\n", "[rank 1] 2 1\n"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("cairn-run: restart 1 of 3\n"),
                    HasSubstr("cairn-run: restart 2 of 3\n"), Not(HasSubstr("restart 3"))));
}

TEST(CairnRun, GivesEachIncarnationAMeetingPlaceOfItsOwn) {
  const ShellResult result = cairn_run(
      "--max-restarts 2 sh -c 'echo $CAIRN_RUN_ID; echo $CAIRN_JOB_TOKEN; echo $MASTER_PORT; exit "
      "4'");
  EXPECT_EQ(result.status, 4);
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 9U) << result.out;
  for (const std::size_t first : {0U, 2U}) {  // the token is the job's
    const std::set<std::string> different{lines[first], lines[first + 3], lines[first + 6]};
    EXPECT_EQ(different.size(), 3U) << result.out;
  }
}

TEST(CairnRun, GivesAllNodesOneMeetingPlace) {
  const auto node = [](const char* rank) {
    return shell("CAIRN_JOB_TOKEN=secret " + std::string(kLauncher) + " --nnodes 2 --node-rank " +
                 rank +
                 " --master-addr 192.0.2.1 --master-port 29500 --max-restarts 1 sh -c 'echo "
                 "$CAIRN_JOB_TOKEN $MASTER_PORT; exit 4'")
        .out;
  };
  EXPECT_EQ(node("0"), "[rank 0] secret 29500\n[rank 0] secret 29500\n");
  EXPECT_EQ(node("1"), "[rank 1] secret 29500\n[rank 1] secret 29500\n");
}

TEST(CairnRun, DoesNotStartAgainWhenItIsToEnd) {
  const ShellResult result =
      cairn_run("--max-restarts 5 sh -c 'echo started; kill -TERM $PPID; exec sleep 60'");
  EXPECT_EQ(result.status, 128 + 15);
  EXPECT_EQ(result.out, "started\n");
}

// What TrainingState::save_on_signal does, in a shell.
TEST(CairnRun, EndsWithAStatusOfItsOwnWhereEveryRankSavedOnASignal) {
  const std::string saves = "trap \"echo saved; exit 75\" TERM; while :; do sleep 0.02; done";
  for (const char* signalled : {"$PPID", "$$"}) {  // cairn-run, or one rank
    const ShellResult result = cairn_run(
        "--nproc-per-node 2 --max-restarts 5 sh -c 'test $RANK = 0 && { sleep 0.3; kill "
        "-TERM " +
        std::string(signalled) + "; } & " + saves + "'");
    EXPECT_EQ(result.status, 75) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("[rank 0] saved"), HasSubstr("[rank 1] saved")));
    EXPECT_THAT(result.err, Not(HasSubstr("failed")));
  }
}

TEST(CairnRun, DoesNotSayThatAllSavedWhereOneDidNot) {
  const ShellResult result = cairn_run(
      "--nproc-per-node 2 sh -c 'test $RANK = 0 && { sleep 0.3; kill -TERM $PPID; } & test $RANK = "
      "0 "
      "&& trap \"exit 75\" TERM; while :; do sleep 0.02; done'");
  EXPECT_EQ(result.status, 128 + 15) << result.err;
}

TEST(CairnRun, KeepsTheLogOfEveryIncarnation) {
  const TemporaryFolder folder;
  cairn_run("--max-restarts 1 --log-dir " + folder.string() +
            " sh -c 'echo try $CAIRN_RESTART_COUNT; exit 4'");
  EXPECT_EQ(read_text(folder / "rank_0.log"), "try 0\ncairn-run: restart 1\ntry 1\n");
}

TEST(CairnRun, LogsWhatTheScreenGets) {
  const TemporaryFolder folder;
  const ShellResult result = cairn_run("--nproc-per-node 2 --tee --log-dir " + folder.string() +
                                       " sh -c 'echo out; test $RANK = 0 || exit 3' 2>&1");
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("[rank 1] out\n"), HasSubstr("failed with exit status 3")));
  EXPECT_EQ(read_text(folder / "screen.log"), result.out);
}

TEST(CairnRun, LeavesAnIgnoredSignalIgnored) {
  const std::string command =
      std::string(kLauncher) + " sh -c 'kill -HUP $PPID; echo done; exec sleep 0.2'";
  EXPECT_EQ(shell(command).status, 128 + 1);
  const ShellResult protected_run = shell("trap '' HUP; " + command);
  EXPECT_EQ(protected_run.status, 0) << protected_run.err;
  EXPECT_EQ(protected_run.out, "done\n");
}

TEST(CairnRun, SeesExitsThoughItsStarterIgnoresThem) {
  const std::string ignoring = "env --ignore-signal=CHLD ";
  if (shell(ignoring + "true").status != 0) GTEST_SKIP() << "this env(1) cannot ignore signals";
  EXPECT_EQ(shell(ignoring + "timeout 60 " + kLauncher + " sh -c 'exit 7'").status, 7);
}

TEST(CairnRun, SendsEachRankOneSigterm) {
  const TemporaryFolder folder;
  const std::string ready = folder.string() + "/ready";
  const std::string wait_for_both =
      "while ! test -e " + ready + "0 || ! test -e " + ready + "1; do sleep 0.02; done; exit 4";
  // Busy, so that a second signal would be handled, and counted, apart from the first.
  const std::string count = "n=0; trap \"n=\\$((n+1)); echo term\" TERM; : >" + ready +
                            "$RANK; while test $n = 0; do :; "
                            "done; i=0; while test $i -lt 200000; do i=$((i+1)); done";
  const ShellResult result =
      cairn_run("--nproc-per-node 3 --grace-period 30 sh -c 'if test $RANK = 2; then " +
                wait_for_both + "; fi; " + count + "'");
  EXPECT_EQ(result.status, 4) << result.err;
  for (const char* rank : {"[rank 0] ", "[rank 1] "}) {
    const std::string line = std::string(rank) + "term\n";
    EXPECT_THAT(result.out, HasSubstr(line));
    EXPECT_EQ(result.out.find(line), result.out.rfind(line)) << result.out;
  }
}

TEST(CairnRun, LeavesChildrenAloneThatItInherited) {
  const TemporaryFolder folder;
  const std::string theirs = unique_sleep();
  const std::string ours = unique_sleep();
  const ShellResult result =
      shell("sh -c '" + theirs + " & echo $! >" + (folder / "pid").string() + "; exec " +
            kLauncher + " sh -c \"setsid " + ours + " & exit 3\"'");
  EXPECT_EQ(result.status, 3);
  EXPECT_FALSE(is_running(ours));
  EXPECT_TRUE(is_running(theirs));
  kill(static_cast<pid_t>(std::stol(read_text(folder / "pid"))), SIGKILL);
}

TEST(CairnRun, GivesRank0OfATerminalATerminal) {
  // script(1) is a terminal to run in; where it is missing there is nothing to show.
  if (shell("command -v script").status != 0) GTEST_SKIP() << "script(1) is not installed";
  const std::string inner = std::string(kLauncher) +
                            " --nproc-per-node 2 sh -c \"test -t 1 && echo rank \\$RANK on a "
                            "terminal || echo rank \\$RANK piped\"";
  const ShellResult result = shell("script -qec '" + inner + "' /dev/null");
  EXPECT_THAT(result.out, HasSubstr("rank 0 on a terminal"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] rank 1 piped"));
  EXPECT_THAT(result.out, Not(HasSubstr("[rank 0]")));
}

}  // namespace
}  // namespace cairn::test
