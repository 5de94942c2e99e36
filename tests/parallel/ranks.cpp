#include "ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>

#include "support/free_port.h"
#include "support/rank_device.h"

namespace cairn::test {
namespace {

using Clock = std::chrono::steady_clock;

std::string this_test() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

struct Rank {
  pid_t pid = -1;
  std::string output_path;
  bool running = true;
  RankResult result;
};

[[noreturn]] void become_rank(int rank, int world_size, int port, const std::string& output_path) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int fd = open(output_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(fd, STDOUT_FILENO);
  dup2(fd, STDERR_FILENO);
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(world_size).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", std::to_string(world_size).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  setenv("CAIRN_JOB_TOKEN", "0123456789abcdef0123456789abcdef", 1);
  setenv("CAIRN_TEST_RANK", std::to_string(rank).c_str(), 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  const std::string filter = "--gtest_filter=" + this_test();
  execl("/proc/self/exe", "test_parallel", filter.c_str(), "--gtest_also_run_disabled_tests",
        nullptr);
  _exit(127);
}

Rank start(int rank, int world_size, int port) {
  Rank started;
  char path[] = "/tmp/cairn_rank_XXXXXX";
  close(mkstemp(path));
  started.output_path = path;
  started.pid = fork();
  if (started.pid == 0) become_rank(rank, world_size, port, path);
  return started;
}

bool has_ended(Rank& rank, double seconds) {
  int status = 0;
  if (!rank.running || waitpid(rank.pid, &status, WNOHANG) != rank.pid) return !rank.running;
  rank.running = false;
  rank.result.seconds = seconds;
  rank.result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  std::ifstream file(rank.output_path);
  rank.result.output = {std::istreambuf_iterator<char>(file), {}};
  unlink(rank.output_path.c_str());
  return true;
}

void run_body(const std::function<void(int)>& body, int rank, Device device) {
  try {
    const core::DefaultDeviceGuard guard(device);
    body(rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
  }
}

}  // namespace

std::vector<RankResult> start_ranks(int world_size, const std::function<void(int)>& body,
                                    double seconds) {
  if (const char* rank = std::getenv("CAIRN_TEST_RANK")) {
    run_body(body, std::atoi(rank), device_of_rank(std::atoi(rank)));
    return {};
  }
  const int port = free_port();
  std::vector<Rank> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(start(rank, world_size, port));
  const auto begin = Clock::now();
#ifdef __SANITIZE_THREAD__
  seconds *= 4;
#endif
  for (;;) {
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
    bool all_ended = true;
    for (Rank& rank : ranks) all_ended = has_ended(rank, elapsed) && all_ended;
    if (all_ended) break;
    if (elapsed > seconds) {
      for (const Rank& rank : ranks) {
        if (rank.running) kill(rank.pid, SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::vector<RankResult> results;
  for (Rank& rank : ranks) results.push_back(std::move(rank.result));
  return results;
}

void run_ranks(int world_size, const std::function<void(parallel::ProcessGroup&)>& body) {
  const auto results = start_ranks(world_size, [&](int) {
    auto group = parallel::ProcessGroup::from_environment();
    body(group);
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, 0) << "rank " << rank << ":\n" << results[rank].output;
  }
}

void run_threads(int world_size, const std::function<void(parallel::ProcessGroup&)>& body) {
  auto groups = parallel::ProcessGroup::in_process(world_size, fast_options());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&body, rank, device = device_of_rank(rank),
                          group = std::move(groups[static_cast<std::size_t>(rank)])]() mutable {
      run_body([&](int) { body(group); }, rank, device);
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
}

void wait_until_broken(const parallel::ProcessGroup& group) {
  const auto end = Clock::now() + std::chrono::seconds(20);
  try {
    while (Clock::now() < end) {
      group.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  } catch (const core::CommunicationError&) {
  }
}

parallel::GroupOptions fast_options() {
  return {.timeout = std::chrono::seconds(10),
          .heartbeat_timeout = std::chrono::seconds(3),
          .rendezvous_timeout = std::chrono::seconds(20)};
}

}  // namespace cairn::test
