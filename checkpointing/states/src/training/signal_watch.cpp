#include "training/signal_watch.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

constexpr int kSignals = 65;
std::array<std::atomic<bool>, kSignals> marks;
static_assert(std::atomic<bool>::is_always_lock_free, "a handler may not lock");

void mark(int number) {
  marks[static_cast<std::size_t>(number)].store(true, std::memory_order_relaxed);
}

}  // namespace

SignalWatch::SignalWatch(int number) : number_(number) {
  CAIRN_CHECK(number > 0 && number < kSignals, "save_on_signal", "expected a signal, got ", number);
  marks[static_cast<std::size_t>(number)] = false;
  struct sigaction action {};
  action.sa_handler = mark;
  action.sa_flags = SA_RESTART;  // nobody's read or write fails of it
  sigemptyset(&action.sa_mask);
  CAIRN_CHECK(sigaction(number, &action, &before_) == 0, "save_on_signal",
              "expected a signal that a program may handle, got ", number, ": ",
              std::strerror(errno));
}

SignalWatch::~SignalWatch() {
  sigaction(number_, &before_, nullptr);
}

bool SignalWatch::came() const {
  return marks[static_cast<std::size_t>(number_)].load(std::memory_order_relaxed);
}

}  // namespace cairn::checkpointing
