// What a process tells of itself, read as another process reads it: from the file.
#include "cairn/core/status.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/status_page.h"

namespace cairn::core {
namespace {

const StatusPage& told_page() {
  static const StatusPage* const page = [] {
    tell_job("127.0.0.1:29500", 1, 2);
    const std::string name = std::string("/memfd:") + StatusPage::kName + " (deleted)";
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry.path(), gone) != name) continue;
      const int file = open(entry.path().c_str(), O_RDONLY);
      return static_cast<const StatusPage*>(
          mmap(nullptr, sizeof(StatusPage), PROT_READ, MAP_SHARED, file, 0));
    }
    return static_cast<const StatusPage*>(nullptr);
  }();
  return *page;
}

const StatusPage::Thread* place_of_this_thread() {
  for (const StatusPage::Thread& thread : told_page().threads) {
    if (thread.id == syscall(SYS_gettid)) return &thread;
  }
  return nullptr;
}

std::string told(const StatusPage::Text& text) {
  return text.get().text;
}

TEST(Status, SaysWhoItIs) {
  const StatusPage& page = told_page();
  EXPECT_EQ(page.magic, StatusPage::kMagic);
  EXPECT_EQ(page.process, getpid());
  EXPECT_EQ(page.rank, 1);
  EXPECT_EQ(page.world_size, 2);
  EXPECT_EQ(told(page.job), "127.0.0.1:29500");
  tell_device("cuda:3");
  EXPECT_EQ(told(page.device), "cuda:3");
}

TEST(Status, AnOuterWaitIsShownAgainAfterAnInnerOne) {
  told_page();
  const StatusTotals before = status_totals();
  const auto begin = std::chrono::steady_clock::now();
  {
    const WaitMark outer("outer");
    const StatusPage::Thread* const own = place_of_this_thread();
    ASSERT_NE(own, nullptr);
    EXPECT_EQ(told(own->wait), "outer");
    const double since = own->wait.get().since;
    {
      const WaitMark inner("inner", WaitMark::Kind::collective);
      EXPECT_EQ(told(own->wait), "inner");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_EQ(told(own->wait), "outer");
    EXPECT_EQ(own->wait.get().since, since);
  }
  EXPECT_EQ(told(place_of_this_thread()->wait), "");
  const StatusTotals after = status_totals();
  EXPECT_EQ(after.collectives - before.collectives, 1u);
  EXPECT_GE(after.waited - before.waited, 0.02);
  const std::chrono::duration<double> outer = std::chrono::steady_clock::now() - begin;
  EXPECT_LE(after.waited - before.waited, outer.count()) << "nested waits count once";
}

TEST(Status, AStepIsToldWithTheTimeThatItWaited) {
  const StatusPage& page = told_page();
  tell_step(6, std::nan(""));
  const auto begin = std::chrono::steady_clock::now();
  {
    const WaitMark outer("a");
    const WaitMark inner("b");
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const std::int64_t steps = page.steps;
  tell_step(7, 0.5);
  EXPECT_EQ(page.step, 7);
  EXPECT_EQ(page.steps, steps + 1);
  EXPECT_EQ(page.losses[static_cast<std::size_t>(steps) % StatusPage::kLosses], 0.5F);
  EXPECT_GE(page.step_waits, 0.03);
  EXPECT_GE(page.step_seconds - page.step_waits, 0.01);
  EXPECT_LE(page.step_waits, waited.count()) << "nested waits count once";
}

TEST(Status, TextsThatAreTooLongAreCut) {
  told_page();
  tell_part(std::string(1000, 'x'), 1);
  EXPECT_EQ(told(place_of_this_thread()->part), std::string(StatusPage::kText, 'x'));
  tell_part("", 0);
}

/// More threads than there are places tell what has one; a place is free when its thread has ended.
TEST(Status, PlacesOfThreadsAreUsedAgain) {
  told_page();
  for (std::size_t round = 0; round < 3; ++round) {
    std::promise<void> end;
    const std::shared_future<void> ended = end.get_future().share();
    std::vector<std::thread> threads;
    std::atomic<std::size_t> with_place = 0, told_count = 0;
    for (std::size_t i = 0; i < StatusPage::kThreads + 4; ++i) {
      threads.emplace_back([&] {
        tell_part("in a thread", 1);
        const StatusPage::Thread* const own = place_of_this_thread();
        if (own != nullptr && told(own->part) == "in a thread") ++with_place;
        ++told_count;
        ended.wait();
      });
    }
    while (told_count < threads.size()) std::this_thread::yield();
    end.set_value();
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(with_place, StatusPage::kThreads - 2) << "in round " << round;
    EXPECT_LE(with_place, StatusPage::kThreads);
  }
}

/// What a reader sees while another thread writes is one of the texts, whole.
TEST(Status, ATextIsReadWhole) {
  static StatusPage::Text text;
  std::atomic<bool> end = false;
  std::thread writer([&] {
    for (std::size_t i = 0; !end; ++i)
      text.set(std::string(1 + i % StatusPage::kText, static_cast<char>('a' + i % 26)),
               static_cast<double>(i));
  });
  int whole = 0;
  for (int i = 0; i < 20000; ++i) {
    const StatusPage::Text::Read read = text.get();
    if (!read.whole || read.text.empty()) continue;
    ++whole;
    const auto number = static_cast<std::size_t>(read.since);
    EXPECT_EQ(read.text,
              std::string(1 + number % StatusPage::kText, static_cast<char>('a' + number % 26)));
  }
  end = true;
  writer.join();
  EXPECT_GT(whole, 100);
}

TEST(Status, AChildTellsNothingInItsParentsName) {
  const StatusPage& page = told_page();
  tell_step(100, 1.0);
  const pid_t child = fork();
  if (child == 0) {
    tell_step(200, 2.0);
    const WaitMark mark("in the child", WaitMark::Kind::collective);
    raise(SIGURG);  // the handler is the child's too
    _exit(tells_status() ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(page.step, 100);
  const auto stacks = page.stacks_begun.load();
  raise(SIGURG);
  EXPECT_EQ(page.stacks_begun, stacks + 1);
}

[[gnu::noinline]] void stand_here() {
  raise(SIGURG);
  asm volatile("");  // no tail call
}

TEST(Status, TheSignalWritesTheStackAndKeepsErrno) {
  const StatusPage& page = told_page();
  ASSERT_EQ(page.signal, SIGURG);
  errno = EDOM;
  stand_here();
  EXPECT_EQ(errno, EDOM);
  const std::uint64_t number = page.stacks_begun;
  const StatusPage::Stack& stack = page.stacks[number % StatusPage::kStacks];
  EXPECT_EQ(stack.number, number);
  EXPECT_EQ(stack.thread, syscall(SYS_gettid));
  const auto begin = reinterpret_cast<std::uint64_t>(&stand_here);
  const auto in_it = [&](std::uint64_t frame) { return frame > begin && frame < begin + 64; };
  ASSERT_GT(stack.depth, 3u);
  EXPECT_TRUE(std::any_of(stack.frames.begin(), stack.frames.begin() + stack.depth, in_it));
}

}  // namespace
}  // namespace cairn::core
