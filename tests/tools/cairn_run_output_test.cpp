// cairn-run's output: whole on terminals and for slow readers, and never in the way of its work.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>

#include <algorithm>
#include <vector>

#include "shell.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kRun = CAIRN_RUN_PROGRAM;
constexpr int kPatienceMs = 60'000;

/// cairn-run, started with a terminal or with pipes that the test reads when it wants to.
struct Started {
  pid_t pid = -1;
  int out = -1;
  int err = -1;

  int wait() const {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
};

[[noreturn]] void become_run(const std::vector<std::string>& arguments) {
  std::vector<char*> pointers{const_cast<char*>(kRun)};
  for (const std::string& text : arguments) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  execv(kRun, pointers.data());
  _exit(125);
}

Started start_on_terminal(const std::vector<std::string>& arguments) {
  Started run;
  run.pid = forkpty(&run.out, nullptr, nullptr, nullptr);
  if (run.pid == 0) become_run(arguments);
  return run;
}

Started start_with_pipes(const std::vector<std::string>& arguments, int flags_of_writing_end = 0) {
  int out[2];
  int err[2];
  EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
  fcntl(out[1], F_SETFL, fcntl(out[1], F_GETFL) | flags_of_writing_end);
  Started run;
  run.pid = fork();
  if (run.pid == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    become_run(arguments);
  }
  close(out[1]);
  close(err[1]);
  run.out = out[0];
  run.err = err[0];
  return run;
}

/// Reads until `until` is there, or to the end.
std::string read_until(int fd, const std::string& until = "") {
  std::string text;
  char buffer[4096];
  pollfd readable{fd, POLLIN, 0};
  while (poll(&readable, 1, kPatienceMs) > 0) {
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got <= 0) break;  // a terminal that nobody holds any more says EIO
    text.append(buffer, static_cast<std::size_t>(got));
    if (!until.empty() && text.find(until) != std::string::npos) break;
  }
  return text;
}

std::vector<std::string> program(const std::string& processes, const std::string& script) {
  return {"--nproc-per-node", processes, "sh", "-c", script};
}

/// Lines that are a number from 1 to `last`, in order, and nothing lost between.
int numbered_lines(const std::string& text, const std::string& prefix) {
  int next = 1;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    next += line == prefix + std::to_string(next);
    begin = end + 1;
  }
  return next - 1;
}

TEST(CairnRunOutput, IsWholeOnATerminal) {
  const Started run =
      start_on_terminal(program("1", "seq 1 20000; echo the last words >&2; exit 3"));
  const std::string text = read_until(run.out);
  EXPECT_EQ(run.wait(), 3);
  EXPECT_EQ(numbered_lines(text, ""), 20000);
  EXPECT_THAT(text, HasSubstr("    the last words"));
  close(run.out);
}

TEST(CairnRunOutput, IsWholeOnATerminalForSeveralRanks) {
  const Started run = start_on_terminal(program("2", "seq 1 20000"));
  const std::string text = read_until(run.out);
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(numbered_lines(text, "[rank 1] "), 20000);
  close(run.out);
}

TEST(CairnRunOutput, WaitsForAReaderOfANonBlockingPipe) {
  const Started run = start_with_pipes(program("1", "seq 1 30001; echo written >&2"), O_NONBLOCK);
  EXPECT_EQ(read_until(run.err, "written\n"), "written\n");  // more than the pipe holds
  EXPECT_EQ(numbered_lines(read_until(run.out), ""), 30001);
  EXPECT_EQ(run.wait(), 0);
  close(run.out);
  close(run.err);
}

TEST(CairnRunOutput, LeavesTheFlagsOfItsStreamsAlone) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    become_run(program("1", "echo flags"));
  }
  const std::string text = read_until(ends[0], "\n");
  EXPECT_EQ(fcntl(ends[1], F_GETFL) & O_NONBLOCK, 0) << "set while it runs";
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(fcntl(ends[1], F_GETFL) & O_NONBLOCK, 0) << "set after its exit";
  EXPECT_EQ(text, "flags\n");
  close(ends[0]);
  close(ends[1]);
}

TEST(CairnRunOutput, ThatNobodyReadsDoesNotHideAFailure) {
  const Started run = start_with_pipes(program("2", "test $RANK = 1 || exec yes; exit 5"));
  EXPECT_THAT(read_until(run.err, "ending the other 1\n"), HasSubstr("rank 1 "));
  kill(run.pid, SIGTERM);  // its job has ended; it waits for the reader
  EXPECT_EQ(run.wait(), 5);
  close(run.out);
  close(run.err);
}

TEST(CairnRunOutput, ThatNobodyReadsDoesNotHoldUpSignals) {
  const Started run = start_with_pipes(program("2", "echo started >&2; exec yes"));
  EXPECT_THAT(read_until(run.err, "started\n"), HasSubstr("started"));
  kill(run.pid, SIGTERM);
  EXPECT_THAT(read_until(run.err, "Terminated"), HasSubstr("ending 2 processes"));
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  close(run.out);
  close(run.err);
}

TEST(CairnRunOutput, OfALoudRankDoesNotStarveOthers) {
  const ShellResult result =
      shell("timeout 60 " + std::string(kRun) +
            " --nproc-per-node 4 sh -c 'test $RANK = 1 || { yes & yes & yes & exec yes; }; exit 6' "
            ">/dev/null");
  EXPECT_EQ(result.status, 6);
}

TEST(CairnRunOutput, GoesOnInSilenceWithoutAReader) {
  const TemporaryFolder folder;
  const std::string mark = (folder / "mark").string();
  for (const char* processes : {"1", "2"}) {
    const Started run =
        start_with_pipes(program(processes, "seq 1 100000; test $RANK = 1 || echo done >" + mark));
    close(run.out);
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(read_text(mark), "done\n");
    std::filesystem::remove(mark);
    close(run.err);
  }
}

// /dev/full is a disk without room.
TEST(CairnRunOutput, ThatIsLostOnAFullDiskIsTold) {
  const TemporaryFolder dir;
  const std::string program = std::string(kRun) + " --nproc-per-node 2 ";
  const ShellResult screen = shell(program + "echo hello > /dev/full");
  EXPECT_EQ(screen.status, 74);
  EXPECT_THAT(screen.err, AllOf(HasSubstr("output is lost"), HasSubstr("No space left")));
  std::filesystem::create_symlink("/dev/full", dir / "rank_1.log");
  const ShellResult log = shell(program + "--log-dir " + dir.string() + " echo hello");
  EXPECT_EQ(log.status, 74);
  EXPECT_THAT(log.err, AllOf(HasSubstr("rank_1.log'"), HasSubstr("No space left")));
  EXPECT_EQ(shell(program + "--log-dir " + dir.string() + " bash -c 'echo x; exit 3'").status, 3);
}

TEST(CairnRunOutput, MayHaveNowhereToGo) {
  const TemporaryFolder folder;
  const std::string mark = (folder / "mark").string();
  const ShellResult result = shell("timeout 60 " + std::string(kRun) +
                                   " --nproc-per-node 2 sh -c 'echo text; test $RANK = 1 || echo "
                                   "done >" +
                                   mark + "' <&- >&- 2>&-");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(read_text(mark), "done\n");
}

TEST(CairnRunOutput, IsOnlyHeldBackWhileTheReaderIsSlow) {
  const Started run = start_with_pipes(program("2", "seq 1 200000"));
  EXPECT_THAT(read_until(run.out, "[rank 0] 10\n"), HasSubstr("[rank "));
  const std::string rest = read_until(run.out);
  EXPECT_THAT(rest, HasSubstr("[rank 0] 200000\n"));
  EXPECT_THAT(rest, HasSubstr("[rank 1] 200000\n"));
  EXPECT_EQ(run.wait(), 0);
  close(run.out);
  close(run.err);
}

}  // namespace
}  // namespace cairn::test
