#include "system.h"

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "support/rank_device.h"

namespace cairn::stateful {

namespace fs = std::filesystem;

Values initial_weight(int parameter, bool fresh) {
  Values values;
  for (int i = 0; i < kSizes[static_cast<std::size_t>(parameter)]; ++i) {
    values.push_back(static_cast<float>((fresh ? 2.1 : 1.1) + parameter / 3.0 - i / 7.0));
  }
  return values;
}

/// Small integers times a power of two: exact in every half type, and so is their mean over two or
/// four ranks.
Values Loss::coefficients(int parameter, int rank) const {
  Values values;
  for (int i = 0; i < kSizes[static_cast<std::size_t>(parameter)]; ++i) {
    const int of_linear = (1 + (parameter + i) % 3) * (rank % 2 == 0 ? 1 : 3);
    values.push_back(size * (form == Form::linear ? of_linear : 1 + i % 2));
  }
  const bool overflows = overflow_rank == 2 || overflow_rank == rank;
  if (overflows && parameter == first()) values[0] = std::numeric_limits<double>::infinity();
  return values;
}

Values Rank::view_values(std::uint64_t seed, int rank) {
  Values values;
  for (std::uint64_t i = 0; i < 10; ++i) {
    values.push_back(
        static_cast<double>((seed * 7 + i * 5 + static_cast<std::uint64_t>(rank) * 3) % 16));
  }
  return values;
}

// ---- The ranks together

/// A thread that does what it is handed.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    start(nullptr);
    thread_.join();
  }
  /// nullptr: ends.
  void start(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_ = std::move(work);
    busy_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
  }

 private:
  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return busy_; });
      const std::function<void()> work = std::move(work_);
      lock.unlock();
      if (work) work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
      if (!work) return;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;
  bool busy_ = false;
  std::thread thread_;  // last: it uses the others
};

namespace {

std::string temporary_folder() {
  // Checkpoints are flushed to the disk: one in memory is faster.
  const std::string parent =
      fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path().string();
  std::string pattern = parent + "/cairn-stateful-XXXXXX";
  return mkdtemp(pattern.data()) != nullptr ? pattern : parent;
}

std::string listed(const Numbers& numbers) {
  std::string text;
  for (const double number : numbers) text += core::str(text.empty() ? "" : ", ", number);
  return text;
}

bool same_bits(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

}  // namespace

System::System(const Setup& setup) : setup_(setup), folder_(temporary_folder()) {
  resize(setup.ranks);
}

void System::resize(int ranks) {
  ranks_.resize(static_cast<std::size_t>(ranks));
  workers_.clear();
  groups_.clear();
  if (ranks == 1) return;
  for (int rank = 1; rank < ranks; ++rank) workers_.push_back(std::make_unique<Worker>());
  // Longer than a busy machine keeps a thread waiting; OneRankThrows waits it out.
  constexpr std::chrono::seconds kTimeout{20};
  groups_ = parallel::ProcessGroup::in_process(
      ranks, {.timeout = kTimeout, .heartbeat_timeout = kTimeout});
}

System::~System() {
  try {
    together([&](std::size_t index) {
      ranks_[index].reset();
      return Numbers();
    });
  } catch (const std::exception&) {  // ranks that differ have been told of
  }
  workers_.clear();
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

System::Outcome System::rebuild(const Setup& setup, bool fresh) {
  if (setup.ranks != setup_.ranks) {
    together([&](std::size_t index) {
      ranks_[index].reset();
      return Numbers();
    });
    resize(setup.ranks);
  }
  setup_ = setup;
  return together([&](std::size_t index) {
    ranks_[index].reset();
    std::optional<parallel::ProcessGroup> group;
    if (!groups_.empty()) group = groups_[index];
    ranks_[index] = make_rank(setup, group, static_cast<int>(index), fresh);
    return Numbers();
  });
}

namespace {

std::string difference(const Rank::Seen& a, const Rank::Seen& b) {
  std::string text;
  const auto compare = [&](const std::string& what, const Values& x, const Values& y) {
    for (std::size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (x[i] != y[i]) text += core::str("\n  ", what, "[", i, "]: ", x[i], " and ", y[i]);
    }
  };
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    const std::string name = kNames[p];
    compare(name, a.parameters[p].weight, b.parameters[p].weight);
    compare(name + " as forward sees it", a.parameters[p].raw, b.parameters[p].raw);
    for (std::size_t m = 0; m < a.parameters[p].moments.size(); ++m) {
      if (m >= b.parameters[p].moments.size()) continue;
      compare("a moment of " + name, a.parameters[p].moments[m], b.parameters[p].moments[m]);
    }
  }
  compare("loss scale", a.loss_scales, b.loss_scales);
  compare("learning rate", a.lrs, b.lrs);
  return text.empty() ? " in dtype, steps or culprit" : text;
}

}  // namespace

Rank::Seen System::look() {
  std::vector<Rank::Seen> seen(ranks_.size());
  const Outcome outcome = together([&](std::size_t index) {
    seen[index] = ranks_[index]->look();
    return Numbers();
  });
  if (outcome.threw()) throw Mismatch("looking threw: " + outcome.error);
  for (const Rank::Seen& own : seen) {
    if (!(own == seen[0])) throw Mismatch("ranks differ" + difference(seen[0], own));
  }
  return seen[0];
}

std::vector<Numbers> System::statistics() {
  std::vector<Numbers> all;
  for (const Outcome& own :
       on_each([&](std::size_t index) { return ranks_[index]->statistics(); })) {
    if (own.threw()) throw Mismatch("looking threw: " + own.error);
    all.push_back(own.numbers);
  }
  return all;
}

std::vector<System::Outcome> System::on_each(const std::function<Numbers(std::size_t)>& work) {
  std::vector<Outcome> outcomes(ranks_.size());
  const auto run = [&](std::size_t index, Device device) {
    const core::DefaultDeviceGuard guard(device);
    try {
      outcomes[index].numbers = work(index);
    } catch (const std::exception& error) {
      outcomes[index].error = *error.what() == '\0' ? "an error without words" : error.what();
    }
  };
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    const Device device = test::device_of_rank(static_cast<int>(i) + 1);
    workers_[i]->start([&run, i, device] { run(i + 1, device); });
  }
  run(0, core::default_device());
  for (const auto& worker : workers_) worker->wait();
  return outcomes;
}

std::vector<System::Outcome> System::apart(const std::function<void(Rank&, int)>& work) {
  return on_each([&](std::size_t index) {
    work(*ranks_[index], static_cast<int>(index));
    return Numbers();
  });
}

System::Outcome System::together(const std::function<Numbers(std::size_t)>& work) {
  std::vector<Outcome> outcomes = on_each(work);
  for (const Outcome& outcome : outcomes) {
    if (outcome.threw() != outcomes[0].threw()) {
      throw Mismatch("one rank throws and another does not: " + outcomes[0].error + outcome.error);
    }
    if (!same_bits(outcome.numbers, outcomes[0].numbers)) {
      throw Mismatch("ranks answer differently: " + listed(outcomes[0].numbers) + " and " +
                     listed(outcome.numbers));
    }
  }
  return outcomes[0];
}

// ---- What they are refused

namespace {

class MemoryLimit {
 public:
  explicit MemoryLimit(std::size_t left) : device_(core::default_device()) {
    core::set_memory_capacity(device_, core::memory_stats(device_).current_total + left);
  }
  ~MemoryLimit() { core::set_memory_capacity(device_, SIZE_MAX); }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  Device device_;
};

}  // namespace

System::Outcome System::refused(const std::function<Numbers(std::size_t)>& work) {
  const Refusal refusal = *std::exchange(refusal_, std::nullopt);
  const Rank::Seen before = look();
  bool is_refused = false;
  const Outcome first = together([&](std::size_t index) {
    const MemoryLimit limit(refusal.left);
    try {
      return work(index);
    } catch (const core::OutOfMemory&) {
      is_refused = true;
      throw;
    }
  });
  if (!is_refused) return first;
  if (const Rank::Seen after = look(); !(after.parameters == before.parameters)) {
    throw Mismatch("what was refused (" + first.error + ") has changed" +
                   difference(before, after));
  }
  Outcome outcome = refusal.gives_up ? first : together(work);
  outcome.refused = first.error;
  return outcome;
}

}  // namespace cairn::stateful
