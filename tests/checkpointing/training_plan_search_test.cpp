// Random models, batches, budgets, devices and worlds, planned by plan_training and then trained by
// every choice: what is said to fit does, what is refused does not by any schedule, and no choice
// stands where a better one would. CAIRN_STATEFUL_SEQUENCES says how many models are tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "checkpointing/planned_training.h"
#include "checkpointing/temporary_folder.h"
#include "plan/schedule_run.h"
#include "support/search.h"
#include "support/tensors.h"

namespace cairn::checkpointing::training_plans {
namespace {

class Drawn {
 public:
  explicit Drawn(std::uint64_t seed) : random_(seed) {}
  int between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }

 private:
  std::mt19937_64 random_;
};

struct RandomTask {
  Task task;
  TrainingPlanOptions options;
};

// A chain of random widths over tokens or features.
RandomTask random_task(Drawn& draw, const std::string& folder) {
  RandomTask random;
  nn::Sequential& model = random.task.model;
  TrainingBatch& batch = random.task.batch;
  manual_seed(1);
  const int samples = draw.between(1, 12), classes = draw.between(2, 300);
  std::int64_t width = 8 * draw.between(1, 12);
  if (draw.one_in(2)) {
    const int tokens = draw.between(1, 20);
    model.add(nn::Embedding(classes, width));
    batch.x = random_classes({samples, tokens}, classes, 2);
    batch.target = random_classes({samples, tokens}, classes, 3);
  } else {
    batch.x = test::normal_tensor({samples, width}, 2);
    batch.target = random_classes({samples}, classes, 3);
  }
  for (int i = draw.between(0, 3); i > 0; --i) {
    switch (draw.between(0, 4)) {
      case 0:
        model.add(nn::GELU());
        break;
      case 1:
        model.add(nn::LayerNorm(width));
        break;
      case 2:
        model.add(nn::Dropout(0.2));
        break;
      default: {
        const std::int64_t next = 8 * draw.between(1, 24);
        const auto activation =
            draw.one_in(2) ? autograd::Activation::relu : autograd::Activation::none;
        model.add(nn::Linear(width, next, {.bias = draw.one_in(2), .activation = activation}));
        width = next;
      }
    }
  }
  model.add(nn::Linear(width, classes, {.bias = draw.one_in(2)}));
  TrainingPlanOptions& options = random.options;
  if (draw.one_in(4)) {
    options.loss = [](const Tensor& y, const Tensor& target) {
      return autograd::mean(y * y) + autograd::cross_entropy(y, target);
    };
  }
  const std::vector<Precision> all = checkpointing::precisions();
  options.precisions = {all[0], all[draw.one_in(2) ? 1 : 3]};
  options.tensors_only = true;
  options.moments = draw.between(0, 2);
  options.compact_state = true;
  options.states_on_host = core::default_device().is_cuda();
  if (!draw.one_in(3)) options.micro_batches = {samples, (samples + 2) / 3};
  if (draw.one_in(3)) options.offload = OffloadOptions{.folder = folder, .min_bytes = 256};
  return random;
}

/// Every way to keep and to recompute the modules begin .. end; outside of segments they may be
/// offloaded.
std::vector<Schedule> every_schedule(std::size_t begin, std::size_t end, bool offload) {
  if (begin == end) return {{}};
  std::vector<Schedule> all;
  const auto add = [&](const SchedulePart& head) {
    for (Schedule rest : every_schedule(head.end, end, offload)) {
      rest.insert(rest.begin(), head);
      all.push_back(std::move(rest));
    }
  };
  add({begin, begin + 1});
  if (offload && begin + 1 < end) add({begin, begin + 1, {}, true});
  for (std::size_t middle = begin + 1; middle < end; ++middle) {
    for (const Schedule& inner : every_schedule(begin, middle, false)) {
      add({begin, middle, inner});
    }
  }
  return all;
}

std::string text_of(nn::Sequential& model) {
  std::string text;
  for (std::size_t i = 0; i < model.size(); ++i) {
    text += model.at(i).kind() + "(" + model.at(i).extra() + ") ";
  }
  return text;
}

/// What a choice is but for its schedule.
using Levers = std::tuple<std::string, std::int64_t, bool, bool, bool, bool>;
Levers levers_of(const TrainingChoice& c) {
  return {c.precision.name, c.micro_batch,   c.fused_loss,
          c.compact_state,  c.balanced_loss, c.states_on_host};
}
bool is_plain(const TrainingChoice& c) {
  return !c.recomputes && !c.offloads;
}

class PlanSearch {
 public:
  explicit PlanSearch(std::uint64_t seed)
      : draw_(seed),
        random_(random_task(draw_, folder_.string())),
        devices_(draw_.one_in(2) || most_devices() < 2 ? 1 : draw_.between(2, most_devices())),
        before_(core::memory_stats(device()).current_total) {}

  void run() {
    SCOPED_TRACE(core::str(random_.task.batch.x.shape(), ' ', text_of(random_.task.model), "on ",
                           devices_, " devices"));
    const std::size_t budget = random_budget();
    const TrainingWorld world{.ranks = draw_.one_in(3) ? draw_.between(2, 5) : 1,
                              .devices = devices_,
                              .bandwidth = draw_.one_in(2) ? 1e8 : 0.0};
    const TrainingPlan plan = plan_with(budget, world);
    if (plan.choices().empty()) return;  // not one module runs
    check_order(plan);
    std::map<Levers, std::vector<const TrainingChoice*>> groups;
    for (const TrainingChoice& choice : plan.choices())
      groups[levers_of(choice)].push_back(&choice);
    for (const auto& [levers, group] : groups) {
      check_group(group, budget);
      check_less_with(groups, *group.front());
    }
  }

 private:
  static Device device() { return core::default_device(); }
  static int most_devices() { return std::min(4, core::device_count(device().type)); }
  TrainingPlan plan_with(std::size_t budget, const TrainingWorld& world) {
    TrainingPlan plan =
        plan_training(random_.task.model, random_.task.batch, budget, world, random_.options);
    EXPECT_EQ(core::memory_stats(device()).current_total, before_);
    return plan;
  }
  // Around the peaks of plain training.
  std::size_t random_budget() {
    std::size_t least = SIZE_MAX, most = 0;
    const TrainingPlan unbounded = plan_with(SIZE_MAX / 2, {.devices = devices_});
    for (const TrainingChoice& choice : unbounded.choices()) {
      least = std::min(least, choice.peak_bytes);
      most = std::max(most, choice.peak_bytes);
    }
    const double share = draw_.between(0, 100) / 100.0;
    const double low = 0.7 * static_cast<double>(least);
    return static_cast<std::size_t>(low + share * (1.05 * static_cast<double>(most) - low));
  }

  std::size_t measured(const TrainingChoice& choice) {
    const std::size_t kept = core::memory_stats(device()).current_total - before_;
    return trained_peak(random_.task, choice, random_.options.moments, devices_) - kept;
  }

  static void check_order(const TrainingPlan& plan) {
    double fastest = HUGE_VAL;
    for (const TrainingChoice& c : plan.choices()) {
      EXPECT_TRUE(std::isfinite(c.seconds) && c.seconds > 0) << c.describe();
      EXPECT_EQ(c.fits, c.peak_bytes <= plan.budget()) << c.describe();
      if (c.fits) fastest = std::min(fastest, c.seconds);
    }
    if (fastest < HUGE_VAL) {
      EXPECT_EQ(plan.best().seconds, fastest);
    } else {
      EXPECT_THROW(plan.best(), core::OutOfMemory);
    }
  }

  // The plain one, and another where that does not fit.
  void check_group(const std::vector<const TrainingChoice*>& group, std::size_t budget) {
    ASSERT_LE(group.size(), 2u);
    const TrainingChoice& first = *group.front();
    const bool any_fits =
        std::any_of(group.begin(), group.end(), [](const auto* c) { return c->fits; });
    const auto* plain =
        *std::find_if(group.begin(), group.end(), [](const auto* c) { return is_plain(*c); });
    EXPECT_EQ(group.size() == 1, plain->fits) << first.describe();
    for (const TrainingChoice* choice : group) {
      const std::size_t peak = measured(*choice);
      EXPECT_TRUE(!choice->fits || peak <= budget)
          << choice->describe() << ": " << peak << " of " << budget << ", predicted "
          << choice->peak_bytes;
      EXPECT_LE(peak, choice->peak_bytes)
          << choice->describe() << ' ' << schedule_text(choice->schedule)
          << ": above the prediction";
      EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(choice->peak_bytes))
          << choice->describe() << " of " << choice->peak_bytes;
    }
    if (!any_fits) check_refused(first, budget);
  }
  // By no schedule at all, or by less than what predictions are above the truth.
  void check_refused(const TrainingChoice& refused, std::size_t budget) {
    TrainingChoice tried = refused;
    const std::size_t modules = random_.task.model.size();
    for (const Schedule& schedule :
         every_schedule(0, modules, random_.options.offload.has_value())) {
      tried.schedule = schedule;
      const std::size_t peak = measured(tried);
      EXPECT_GT(static_cast<double>(peak), 0.9 * static_cast<double>(budget))
          << refused.describe() << " was refused at " << refused.peak_bytes << " of " << budget;
    }
  }

  // Compact state, or states on the host, take no more, all else equal.
  static void check_less_with(const std::map<Levers, std::vector<const TrainingChoice*>>& groups,
                              const TrainingChoice& one) {
    const auto plain_peak = [&](Levers levers) -> std::optional<std::size_t> {
      const auto group = groups.find(levers);
      if (group == groups.end()) return {};
      for (const TrainingChoice* c : group->second) {
        if (is_plain(*c)) return c->peak_bytes;
      }
      return {};
    };
    const Levers own = levers_of(one);
    Levers compact = own;
    std::get<3>(compact) = true;
    EXPECT_LE(plain_peak(compact).value_or(0), *plain_peak(own)) << one.describe();
    Levers on_host = own;
    std::get<5>(on_host) = true;
    EXPECT_LE(plain_peak(on_host).value_or(0), *plain_peak(own)) << one.describe();
  }

  TemporaryFolder folder_;
  Drawn draw_;
  RandomTask random_;
  int devices_;
  std::size_t before_;
};

TEST(TrainingPlanSearch, WhatFitsFitsAndWhatIsRefusedDoesNot) {
  const bool on_gpu = core::default_device().is_cuda();  // a simulated one takes its time
  const int usual = on_gpu ? 2 : 8;
  const int plans = std::max(1, test::number_in("CAIRN_STATEFUL_SEQUENCES", usual * 50) / 50);
  const std::uint64_t first = test::search_seed();
  log::set_level(log::Level::off);
  for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(plans); ++seed) {
    SCOPED_TRACE(seed);
    PlanSearch(seed).run();
    if (HasFailure()) break;
  }
  log::set_level(log::Level::info);
}

}  // namespace
}  // namespace cairn::checkpointing::training_plans
