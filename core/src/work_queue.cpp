#include "work_queue.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "cairn/core/log.h"
#include "cairn/core/work_observer.h"

namespace cairn::core {

struct WorkQueue::State {
  struct Item {
    std::function<void(const std::exception_ptr&)> work;
    bool always;
  };

  std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  std::uint64_t submitted = 0;
  std::uint64_t finished = 0;
  bool closed = false;
  std::exception_ptr error;

  void keep_error(std::exception_ptr fresh) {
    const std::lock_guard lock(mutex);
    if (!error) error = std::move(fresh);
  }
};

namespace {

std::string describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

}  // namespace

WorkQueue::WorkQueue(std::string name, Task on_start) : state_(std::make_shared<State>()) {
  state_->name = std::move(name);
  thread_ = std::thread([state = state_, start = std::move(on_start)] { run(state, start); });
}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
    return;
  }
  thread_.join();
  if (const std::exception_ptr error = take_error()) {
    log::error("stream '{}' ended with an error that nobody waited for: {}", state_->name,
               describe(error));
  }
}

void WorkQueue::submit(Task work) {
  if (thread_.get_id() == std::this_thread::get_id()) return work();
  {
    const std::lock_guard lock(state_->mutex);
    state_->items.push_back({[work = std::move(work)](const std::exception_ptr&) { work(); },
                             /*always=*/false});
    ++state_->submitted;
  }
  state_->changed.notify_all();
}

void WorkQueue::submit_always(std::function<void(const std::exception_ptr&)> work) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->items.push_back({std::move(work), /*always=*/true});
    ++state_->submitted;
  }
  state_->changed.notify_all();
}

bool WorkQueue::idle() const {
  const std::uint64_t running = thread_.get_id() == std::this_thread::get_id() ? 1 : 0;
  const std::lock_guard lock(state_->mutex);
  return state_->finished + running == state_->submitted;
}

void WorkQueue::drain() {
  if (thread_.get_id() == std::this_thread::get_id()) return;  // its own earlier work is done
  std::unique_lock lock(state_->mutex);
  const std::uint64_t target = state_->submitted;
  state_->changed.wait(lock, [&] { return state_->finished >= target; });
}

std::exception_ptr WorkQueue::take_error() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->error, nullptr);
}

void WorkQueue::set_error(std::exception_ptr error) {
  state_->keep_error(std::move(error));
}

void WorkQueue::run(const std::shared_ptr<State>& state, const Task& on_start) {
  pthread_setname_np(pthread_self(), state->name.substr(0, 15).c_str());
  on_start();
  const WorkStreamGuard stream(state->name);
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->closed || !state->items.empty(); });
    if (state->items.empty()) return;
    State::Item item = std::move(state->items.front());
    state->items.pop_front();
    const std::exception_ptr pending = state->error;
    lock.unlock();
    try {
      if (item.always || !pending) item.work(pending);
    } catch (...) {
      state->keep_error(std::current_exception());
    }
    item.work = nullptr;  // what it holds is dropped before it counts as finished
    lock.lock();
    ++state->finished;
    state->changed.notify_all();
  }
}

}  // namespace cairn::core
