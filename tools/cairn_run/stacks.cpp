// `cairn-run stacks`: a signal has each thread write its stack's addresses into the rank's page;
// their names are looked up here.
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "ask.h"
#include "symbols.h"

namespace cairn::run {
namespace {

using core::StatusPage;
using Frames = std::vector<std::uint64_t>;

constexpr auto kPatience = std::chrono::seconds(1);

std::vector<int> threads_of(pid_t process) {
  std::vector<int> threads;
  for (const std::string& name : names_in("/proc/" + std::to_string(process) + "/task"))
    threads.push_back(std::atoi(name.c_str()));
  std::sort(threads.begin(), threads.end());
  return threads;
}

bool blocks(const std::string& folder, int signal_number) {
  std::ifstream file(folder + "/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("SigBlk:")) continue;
    const std::uint64_t blocked = std::strtoull(line.c_str() + 7, nullptr, 16);
    return (blocked >> (signal_number - 1)) % 2 == 1;
  }
  return false;
}

/// Of this thread, written after the stack number `after`; empty: none yet.
Frames written_stack(const StatusPage& page, int thread, std::uint64_t after) {
  for (const StatusPage::Stack& stack : page.stacks) {
    const std::uint64_t number = stack.number.load(std::memory_order_acquire);
    if (number <= after || stack.thread != thread) continue;
    const auto depth = std::min<std::size_t>(stack.depth, stack.frames.size());
    Frames frames(stack.frames.begin(), stack.frames.begin() + static_cast<std::ptrdiff_t>(depth));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (stack.number.load(std::memory_order_relaxed) == number) return frames;
  }
  return {};
}

Frames ask_thread(const RankStatus& rank, int thread) {
  const std::uint64_t before = rank.page->stacks_begun.load();
  if (syscall(SYS_tgkill, rank.pid, thread, SIGURG) != 0) return {};
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    Frames frames = written_stack(*rank.page, thread, before);
    if (!frames.empty() || std::chrono::steady_clock::now() > end) return frames;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

/// Why a thread cannot answer; "": it can.
std::string hindrance(const RankStatus& rank, const std::string& folder, char state) {
  if (rank.page->signal != SIGURG) return "the program handles SIGURG itself";
  if (state == 'T' || state == 't') return "it is stopped";
  if (blocks(folder, SIGURG)) return "it blocks SIGURG";
  return "";
}

std::string stack_of(const RankStatus& rank, int thread, Symbols& symbols) {
  const std::string folder =
      "/proc/" + std::to_string(rank.pid) + "/task/" + std::to_string(thread);
  const ProcessState now = process_state(folder);
  std::string text = "  thread " + std::to_string(thread) + " '" + now.name + "'";
  std::string silent = hindrance(rank, folder, now.state);
  const Frames frames = silent.empty() ? ask_thread(rank, thread) : Frames();
  if (silent.empty() && frames.empty()) silent = "it does not answer";
  if (!silent.empty()) return text + ": " + silent + "\n";
  text += "\n";
  for (std::size_t i = 0; i < frames.size(); ++i) {
    // A call that never returns may be the last of its function: one byte earlier is still in it.
    text += "    #" + std::to_string(i) + "  " + symbols.name(frames[i] - (i > 0 ? 1 : 0)) + "\n";
  }
  return text;
}

}  // namespace

std::string stacks_of(const JobStatus& job) {
  std::string text = table_of(job, 0);
  for (const RankStatus& rank : job.ranks) {
    text += "\nrank " + std::to_string(rank.rank) + " (process " + std::to_string(rank.pid) + ")\n";
    Symbols symbols(rank.pid);
    for (const int thread : threads_of(rank.pid)) text += stack_of(rank, thread, symbols);
  }
  return text;
}

}  // namespace cairn::run
