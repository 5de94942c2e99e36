#include "group/last_words.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "group/group_impl.h"
#include "store/store.h"

namespace cairn::parallel {
namespace {

constexpr auto kLongest = std::chrono::seconds(3);  // for which an ending process waits to be heard

struct LiveJobs {
  std::mutex mutex;
  std::vector<std::weak_ptr<JobConnection>> jobs;
};

/// Outlives all other objects: their destructors may throw.
LiveJobs& live_jobs() {
  static auto* const jobs = new LiveJobs;
  return *jobs;
}

void tell_all_jobs(const std::string& words) {
  std::vector<std::shared_ptr<JobConnection>> alive;
  {
    const std::lock_guard lock(live_jobs().mutex);
    for (const auto& weak : live_jobs().jobs) {
      if (auto job = weak.lock()) alive.push_back(std::move(job));
    }
  }
  for (const auto& job : alive)
    job->coordinator->break_group(core::str("rank ", job->environment.rank, words));
  for (const auto& job : alive) job->coordinator->leave();  // returns when the others have heard
}

/// In a thread of its own: this one may hold any lock.
void tell_in_time() noexcept {
  try {
    const auto told = std::make_shared<std::promise<void>>();
    std::thread([told, words = words_on_exception()] {
      tell_all_jobs(words);
      told->set_value();
    }).detach();
    told->get_future().wait_for(kLongest);
  } catch (const std::exception&) {  // they hear that it has died
  }
}

std::terminate_handler handler_before = nullptr;

void on_terminate() {
  static std::atomic<bool> begun = false;
  if (begun.exchange(true)) {
    std::this_thread::sleep_for(kLongest);  // another thread tells
  } else {
    tell_in_time();
  }
  handler_before();
}

}  // namespace

std::string words_on_exception() {
  const std::string who = core::str(" (", this_process(), ") ");
  const std::exception_ptr thrown = std::current_exception();
  if (!thrown) return who + "called std::terminate";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return core::str(who, "threw: ", error.what());
  } catch (...) {
    return who + "threw what is no std::exception";
  }
}

void tell_of_terminate(const std::shared_ptr<JobConnection>& job) {
  LiveJobs& live = live_jobs();
  const std::lock_guard lock(live.mutex);
  std::erase_if(live.jobs, [](const auto& weak) { return weak.expired(); });
  live.jobs.push_back(job);
  if (handler_before != nullptr) return;
  handler_before = std::get_terminate();
  std::set_terminate(on_terminate);
}

}  // namespace cairn::parallel
