// cairn-run status, top and stacks, of real ranks: they hang, are stopped, belong to others, who
// are refused a profile too.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "cairn/core/status.h"
#include "cairn/core/status_page.h"
#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "parallel/ranks.h"
#include "shell.h"

namespace cairn::test {
namespace {

using nlohmann::json;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

std::string asked(const std::string& arguments) {
  const ShellResult result = shell(std::string(CAIRN_RUN_PROGRAM) + " " + arguments);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.out;
}

ShellResult refused(const std::string& arguments) {
  ShellResult result = shell(std::string(CAIRN_RUN_PROGRAM) + " " + arguments);
  EXPECT_EQ(result.out, "");
  return result;
}

std::string meeting_place() {
  return std::string(std::getenv("MASTER_ADDR")) + ":" + std::getenv("MASTER_PORT");
}

std::string parent() {
  return std::to_string(getppid());
}

const json* rank_in(const json& jobs, int rank) {
  for (const json& told : jobs.at(0).at("ranks")) {
    if (told.at("rank") == rank) return &told;
  }
  return nullptr;
}

std::vector<std::string> waits_of(const json& jobs, int rank) {
  std::vector<std::string> waits;
  const json* const told = rank_in(jobs, rank);
  if (told == nullptr) return waits;
  for (const json& thread : told->at("threads")) {
    if (thread.contains("wait")) waits.push_back(thread["wait"]);
  }
  return waits;
}

/// Until the answer has what it should; the last one.
json status_when(const std::function<bool(const json&)>& fits) {
  json jobs;
  for (int i = 0; i < 100; ++i) {
    jobs = json::parse(asked("status --json " + meeting_place()));
    if (fits(jobs)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return jobs;
}

/// Where a rank of these tests hangs: in a function that its stack must name.
[[gnu::noinline]] void hang_in_a_named_function(const parallel::ProcessGroup& group,
                                                const std::string& until) {
  while (!std::filesystem::exists(until)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    group.check();
  }
}

/// Rank 1 hangs, rank 0 waits for it in a collective of another thread, and asks meanwhile.
void hang_while(const std::function<void(int hung, const json& told)>& ask) {
  const auto results = start_ranks(2, [&](int rank) {
    const auto group = parallel::ProcessGroup::from_environment();
    const std::string until = "/tmp/cairn_asking_" + parent();
    const Tensor x = Tensor::zeros({12}), y = Tensor::zeros({1});
    core::tell_step(40 + rank, 0.25);
    core::tell_step(41 + rank, 0.5);
    if (rank == 1) {
      core::tell_part("lost", 0);
      hang_in_a_named_function(group, until);
      group.all_reduce(x, parallel::ReduceOp::sum, "late");
      return;
    }
    std::thread waiting([&] { group.all_reduce(x, parallel::ReduceOp::sum, "late"); });
    const json told = status_when([](const json& jobs) {
      const json* const other = rank_in(jobs, 1);
      return other != nullptr && other->dump().find("lost") != std::string::npos &&
             waits_of(jobs, 1).empty() && !waits_of(jobs, 0).empty() &&
             waits_of(jobs, 0).front().starts_with("all_reduce");
    });
    const json* const hung = rank_in(told, 1);
    try {
      if (hung != nullptr) ask(hung->at("pid").get<int>(), told);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (hung != nullptr) kill(hung->at("pid").get<int>(), SIGCONT);
    std::ofstream(until) << "go on";
    waiting.join();
    std::filesystem::remove(until);
    ASSERT_NE(hung, nullptr) << told;
  });
  for (const RankResult& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Asking, StatusTellsWhatEachRankIsIn) {
  hang_while([](int, const json& told) {
    EXPECT_EQ(told[0]["job"], meeting_place());
    EXPECT_EQ(told[0]["absent"], json::array());
    const json& own = *rank_in(told, 0);
    const json& other = *rank_in(told, 1);
    EXPECT_EQ(own["pid"], getpid());
    EXPECT_EQ(own["step"], 41);
    EXPECT_EQ(other["step"], 42);
    EXPECT_EQ(other["loss"], 0.5);
    EXPECT_GT(other["memory"], 1 << 20);
    EXPECT_GE(own["collectives"], 1);
    EXPECT_EQ(other["threads"][0]["part"], "lost");
    EXPECT_THAT(waits_of(told, 0), testing::ElementsAre("all_reduce sum f32[12] 'late'"));
    EXPECT_THAT(waits_of(told, 1), testing::IsEmpty());
    const std::string table = asked("status " + parent());
    EXPECT_THAT(table, HasSubstr("2 of 2 ranks"));
    EXPECT_THAT(table, ContainsRegex("  0 .* 41 .*all_reduce sum f32.12. 'late' [0-9.]+ s"));
    EXPECT_THAT(table, ContainsRegex("  1 .* 42 .* lost "));
  });
}

/// As a rank of another machine: who looks here does not find its page.
void hide_page() {
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(file, gone) == "/memfd:cairn-status (deleted)")
      close(std::stoi(file.path().filename().string()));
  }
}

int pid_of_rank_2(const parallel::ProcessGroup& group) {
  const Tensor pid = Tensor::from<std::int64_t>({group.rank() == 2 ? getpid() : 0}, {1});
  group.all_reduce(pid, parallel::ReduceOp::sum);
  return static_cast<int>(pid.to_vector<std::int64_t>().front());
}

TEST(Asking, Rank0TellsOfOtherMachines) {
  const auto results = start_ranks(3, [&](int rank) {
    const auto group = parallel::ProcessGroup::from_environment();
    core::tell_step(40 + rank, 0.25 + rank);
    core::tell_step(41 + rank, 0.5 + rank);
    core::tell_part("forward", 0);
    core::tell_device("cpu:0");
    core::tell_temperature(50.4 + rank);
    if (rank > 0) hide_page();
    group.barrier();
    if (rank == 0) {
      const json told = status_when([](const json& jobs) { return jobs[0]["ranks"].size() == 3; });
      EXPECT_EQ(told[0]["absent"], json::array());
      for (const int other : {1, 2}) {
        const json* const one = rank_in(told, other);
        ASSERT_NE(one, nullptr) << told;
        EXPECT_EQ(one->at("step"), 41 + other);
        EXPECT_EQ(one->at("loss"), 0.5 + other);
        EXPECT_EQ(one->at("world_size"), 3);
        EXPECT_GT(one->at("memory"), 1 << 20);
        EXPECT_GE(one->at("collectives"), 1);
        EXPECT_EQ(one->at("device"), "cpu:0");
        EXPECT_EQ(one->at("temperature"), 50.4 + other);
        EXPECT_EQ(one->at("threads")[0]["part"], "forward");
        EXPECT_NE(one->at("pid"), getpid());
        EXPECT_FALSE(one->at("host").get<std::string>().empty());
      }
      const std::string table = asked("status " + meeting_place());
      EXPECT_THAT(table, HasSubstr("3 of 3 ranks"));
      EXPECT_THAT(table, ContainsRegex("rank +host +pid "));
      EXPECT_THAT(table, ContainsRegex("  0 .* cpu:0 +50 C "));
      EXPECT_THAT(table, ContainsRegex("  2 .* 43 .* cpu:0 +52 C  forward "));
      EXPECT_THAT(asked("top --once " + meeting_place()), HasSubstr("3 of 3 ranks"));
    }
    group.barrier();
    const int third = pid_of_rank_2(group);
    if (rank == 0) {  // who does not answer is not waited for
      kill(third, SIGSTOP);
      const std::string table = asked("status " + meeting_place());
      EXPECT_THAT(table, HasSubstr("2 of 3 ranks"));
      EXPECT_THAT(table, HasSubstr("no word of rank 2: not begun, stopped, or ended"));
      kill(third, SIGCONT);
    }
    group.barrier();
  });
  for (const RankResult& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Asking, ARankThatIsStoppedCannotFailToAnswer) {
  hang_while([](int hung, const json&) {
    kill(hung, SIGSTOP);
    const json told =
        status_when([](const json& jobs) { return rank_in(jobs, 1)->at("state") == "stopped"; });
    EXPECT_EQ(rank_in(told, 1)->at("state"), "stopped");
    EXPECT_EQ(rank_in(told, 1)->at("step"), 42);
    EXPECT_THAT(asked("stacks " + std::to_string(hung)), HasSubstr("it is stopped"));
    kill(hung, SIGCONT);
  });
}

TEST(Asking, StacksNameTheFunctionThatARankHangsIn) {
  hang_while([](int hung, const json&) {
    const std::string stacks = asked("stacks " + meeting_place());
    const std::size_t other = stacks.find("\nrank 1 ");
    ASSERT_NE(other, std::string::npos) << stacks;
    EXPECT_THAT(stacks.substr(other),
                ContainsRegex("thread " + std::to_string(hung) +
                              " .*(\n    #[0-9]+ .*)*hang_in_a_named_function"));
    EXPECT_THAT(stacks.substr(0, other), HasSubstr("ProcessGroup::all_reduce("));
    EXPECT_THAT(stacks, Not(HasSubstr("does not answer")));
    EXPECT_THAT(stacks, Not(HasSubstr("write_stack"))) << "the handler's own frames";
  });
}

/// A terminal of 60 columns for `cairn-run top`; what it draws until it has `wanted`, and a signal.
std::string drawn_by_top(const std::string& job, const std::string& wanted, int& status) {
  winsize size{.ws_row = 20, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) {
    execl(CAIRN_RUN_PROGRAM, "cairn-run", "top", job.c_str(), nullptr);
    _exit(127);
  }
  std::string drawn;
  bool asked_to_end = false;
  for (int i = 0; i < 500; ++i) {
    pollfd wait{terminal, POLLIN, 0};
    poll(&wait, 1, 20);
    char buffer[4096];
    const ssize_t got = wait.revents == 0 ? 0 : read(terminal, buffer, sizeof buffer);
    if (got < 0) break;  // EIO: it has ended
    drawn.append(buffer, static_cast<std::size_t>(got));
    const auto first = drawn.find(wanted);
    const bool twice =
        first != std::string::npos && drawn.find(wanted, first + 1) != std::string::npos;
    if (twice && !std::exchange(asked_to_end, true)) kill(child, SIGINT);
  }
  waitpid(child, &status, 0);
  close(terminal);
  return drawn;
}

TEST(Asking, TopDrawsEachSecondAndGivesTheScreenBack) {
  hang_while([](int hung, const json&) {
    int status = -1;
    const std::string drawn = drawn_by_top(std::to_string(hung), "0.5 to 0.25  ▁█", status);
    EXPECT_EQ(status, 0);
    EXPECT_THAT(drawn, testing::StartsWith("\033[?1049h"));
    EXPECT_THAT(drawn, HasSubstr("\033[?25h\033[?1049l"));
    EXPECT_THAT(asked("top --once " + std::to_string(hung)), HasSubstr("0.5 to 0.25  ▁█"));
    EXPECT_THAT(refused("top " + std::to_string(hung)).err, HasSubstr("--once"));
  });
}

TEST(Asking, WhereNobodyIsToAskOneLineSaysWhy) {
  const std::string own = std::to_string(getpid());
  const std::pair<std::string, std::string> cases[] = {
      {"status 999999999", "there is no process 999999999"},
      {"status 1.2.3.4:99", "no rank on this machine meets others at 1.2.3.4:99"},
      {"stacks train", "as a process id or ADDRESS:PORT, got 'train'"},
      {"status $'\\033[2J'", "got '?[2J'"},
      {"top 0", "got '0'"},
      {"status --jsn", "unknown flag '--jsn': did you mean --json?"},
      {"status 1 2", "not expected"},
  };
  for (const auto& [arguments, message] : cases) {
    const ShellResult result =
        shell("bash -c \"" + std::string(CAIRN_RUN_PROGRAM) + " " + arguments + "\"");
    EXPECT_NE(result.status, 0) << arguments;
    EXPECT_THAT(result.err, HasSubstr(message)) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(Asking, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  hang_while([](int hung, const json&) {
    // The program may lie where others may not look: its text is handed over as standard input.
    const std::string copy = "/tmp/cairn_asking_copy_" + parent();
    std::filesystem::copy_file(CAIRN_RUN_PROGRAM, copy);
    std::filesystem::permissions(copy, std::filesystem::perms(0755));
    for (const char* question : {"status", "stacks", "top --once", "profile"}) {
      const ShellResult result = shell("setpriv --reuid 65534 --regid 65534 --clear-groups " +
                                       copy + " " + question + " " + std::to_string(hung));
      EXPECT_EQ(result.status, 1) << result.err;
      EXPECT_EQ(result.out, "");
      EXPECT_THAT(result.err, HasSubstr("belongs to user root, and only they and root may ask"));
    }
    std::filesystem::remove(copy);
  });
}

/// A process with an open file of the name, and these bytes, until the end of this object's life.
class ProcessWithPage {
 public:
  explicit ProcessWithPage(const std::vector<char>& bytes) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    child_ = fork();
    if (child_ == 0) {
      std::vector<char> page = bytes;
      const pid_t own = getpid();
      if (page.size() > offsetof(core::StatusPage, signal))
        std::memcpy(page.data() + offsetof(core::StatusPage, process), &own, sizeof own);
      const int file = memfd_create(core::StatusPage::kName, 0);
      const bool written = write(file, page.data(), page.size()) == std::ssize(page);
      if (write(ready[1], "x", 1) != 1 || !written) _exit(1);
      for (;;) pause();
    }
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]), close(ready[1]);
  }
  ~ProcessWithPage() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  ProcessWithPage(const ProcessWithPage&) = delete;
  ProcessWithPage& operator=(const ProcessWithPage&) = delete;
  std::string id() const { return std::to_string(child_); }

 private:
  pid_t child_;
};

/// It has the page of its parent open, and is none.
TEST(Asking, AChildIsNotCountedForItsParent) {
  core::tell_job("", 0, 1);
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  const json told = json::parse(asked("status --json " + std::to_string(getpid())));
  EXPECT_EQ(told.size(), 1u) << told;
  EXPECT_THAT(refused("status " + std::to_string(child)).err, HasSubstr("tells of itself"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

std::vector<char> with_magic(std::vector<char> bytes) {
  const std::uint64_t magic = core::StatusPage::kMagic;
  std::memcpy(bytes.data() + offsetof(core::StatusPage, magic), &magic, sizeof magic);
  return bytes;
}

TEST(Asking, PagesOfNonsenseAreRefusedOrShownAsText) {
  const ProcessWithPage shorter({1, 2, 3});
  EXPECT_THAT(refused("status " + shorter.id()).err, HasSubstr("tells of itself"));
  const ProcessWithPage empty(std::vector<char>(sizeof(core::StatusPage)));
  EXPECT_THAT(refused("status " + empty.id()).err, HasSubstr("tells of itself"));
  std::minstd_rand draw(5);
  for (int i = 0; i < 5; ++i) {
    std::vector<char> noise(sizeof(core::StatusPage));
    for (char& byte : noise) byte = static_cast<char>(draw() >> 8);
    const ProcessWithPage process(with_magic(noise));
    const std::string table = asked("top --once " + process.id());
    EXPECT_THAT(table, Not(HasSubstr("\033")));
    EXPECT_TRUE(json::accept(asked("status --json " + process.id())));
    EXPECT_THAT(asked("stacks " + process.id()), HasSubstr("\nrank "));
  }
}

}  // namespace
}  // namespace cairn::test
