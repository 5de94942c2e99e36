#include "cairn/checkpointing/planner.h"

#include <algorithm>
#include <any>
#include <chrono>
#include <limits>
#include <optional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/observer.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/nn/sequential.h"
#include "chain_schedule.h"

namespace cairn::checkpointing {

namespace {

constexpr const char* kPlanner = "plan_recomputation";

// ---- Measuring a block by itself

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The input as the block before would hand it over: its gradient goes nowhere.
struct BlockBefore {
  static constexpr autograd::OpInfo kInfo{"plan_before"};
  Tensor forward(autograd::Context&, const Tensor&, const Tensor& x) { return x.detach(); }
  autograd::Tensors backward(autograd::Context&, const Tensor&) { return {{}, {}}; }
};

// Stands for the blocks behind: its backward makes the gradient of the result, then `begins`.
struct BlocksBehind {
  static constexpr autograd::OpInfo kInfo{"plan_behind"};
  std::function<void()> begins;
  Tensor forward(autograd::Context&, const Tensor& y) {
    return Tensor::zeros({1}, DType::f32, y.device());
  }
  autograd::Tensors backward(autograd::Context& ctx, const Tensor&) {
    const Tensor dy = ctx.new_gradient(0);
    kernels::fill(dy, 0.0);
    begins();
    return {dy};
  }
};

// The parameters that operations take; each without a gradient.
class Parameters : public autograd::ScopedObserver {
 public:
  void clear() {
    for (Tensor& p : seen_) p.clear_grad();
    seen_.clear();
  }

 private:
  void on_begin(const autograd::OpEvent& event) override {
    if (event.phase != autograd::Phase::recompute) return;
    for (const Tensor& p : event.parameters) {
      CAIRN_CHECK(!p.grad().defined(), kPlanner,
                  "expected parameters without gradients, got one in '", p.name(),
                  "' (plan before the first backward, or after clear_grad())");
      seen_.push_back(p);
    }
  }
  void on_end(const autograd::OpEvent&) override {}

  std::vector<Tensor> seen_;
};

class BlockMeter {
 public:
  BlockMeter(const Segment& block, const Tensor& x, bool wants_gradient)
      : block_(block), x_(x), device_(x.device()) {
    if (wants_gradient) anchor_ = Tensor::zeros({1}, DType::f32, device_).set_requires_grad(true);
  }

  /// Leaves the result, and whether it wants a gradient.
  BlockProfile measure(int repeats) {
    const std::size_t before = level();
    pass();  // the first run of anything is slow, and autocast keeps what it casts
    profile_.cached = level() - before;
    for (int i = 0; i < repeats; ++i) step();
    result_ = pass();
    return profile_;
  }
  const Tensor& result() const { return result_; }
  bool result_wants_gradient() const { return differentiable_; }

 private:
  Tensor input() const {
    return anchor_.defined() ? autograd::apply(BlockBefore{}, anchor_, x_) : x_;
  }

  std::size_t level() const {
    core::Stream::current(device_).synchronize();
    return core::memory_stats(device_).current_total;
  }
  std::size_t peak() const {
    core::Stream::current(device_).synchronize();
    return core::memory_stats(device_).peak_total;
  }

  // A run that keeps nothing, as the first run of a segment.
  Tensor pass() {
    const std::size_t base = level();
    core::reset_peak_memory(device_);
    const autograd::SavedTensorHooksGuard drop(
        {[](const Tensor&) { return std::any(); }, [](const std::any&) { return Tensor(); }});
    const Tensor y = block_(input());
    profile_.light_peak = peak() - base;
    CAIRN_CHECK(y.defined() && y.device() == device_, kPlanner, "expected blocks with a result on ",
                device_, ", got another one");
    profile_.output = y.storage() == x_.storage() ? 0 : y.storage()->bytes();
    profile_.gradient = y.nbytes();
    return y.detach();
  }

  // Forward and backward as in a chain where all is kept.
  void step() {
    Parameters parameters;
    std::unordered_set<const core::Storage*> saved;
    const std::size_t base = level();
    core::reset_peak_memory(device_);
    const double begin = now_seconds();
    Tensor y = forward(saved);
    const std::size_t forward_peak = peak() - base;
    fastest(profile_.forward_seconds, now_seconds() - begin);
    profile_.forward_peak = forward_peak;
    profile_.saves_input = saved.contains(x_.storage().get());
    profile_.saves_output = profile_.output > 0 && saved.contains(y.storage().get());
    differentiable_ = y.requires_grad();
    if (!differentiable_) return;
    double backward_begin = 0;
    std::size_t begin_level = 0;
    profile_.lead = 0;
    Tensor loss = autograd::apply(BlocksBehind{[&] {
                                    core::Stream::current(device_).synchronize();
                                    core::reset_peak_memory(device_);
                                    begin_level = level();
                                    backward_begin = now_seconds();
                                  }},
                                  y);
    y = Tensor();
    profile_.saved = level() - base - loss.nbytes() - (profile_.saves_output ? profile_.output : 0);
    bool asked = false;
    on_asked_ = [&] {
      if (!std::exchange(asked, true)) profile_.lead = level() - begin_level;
    };
    autograd::backward(loss);
    on_asked_ = nullptr;
    profile_.backward_peak = peak() - base - loss.nbytes();
    fastest(profile_.backward_seconds, now_seconds() - backward_begin);
    loss = Tensor();
    profile_.parameter_gradients = level() - base;
    parameters.clear();
  }

  // What a parameter is saved as is no business of replays.
  struct Kept {
    autograd::SavedTensor tensor;
    bool parameter;
  };

  Tensor forward(std::unordered_set<const core::Storage*>& saved) {
    const autograd::SavedTensorHooksGuard hooks(
        {[&](const Tensor& x) -> std::any {
           const bool parameter = autograd::is_parameter(x);
           if (!parameter) saved.insert(x.storage().get());
           return std::make_shared<Kept>(Kept{autograd::SavedTensor(x), parameter});
         },
         [this](const std::any& value) {
           const auto& kept = std::any_cast<const std::shared_ptr<Kept>&>(value);
           if (!kept->parameter) on_asked_();
           return kept->tensor.unpack(kPlanner);
         }});
    return block_(input());
  }

  void fastest(double& seconds, double measured) const {
    seconds = seconds == 0 ? measured : std::min(seconds, measured);
  }

  const Segment& block_;
  Tensor x_, anchor_, result_;
  Device device_;
  BlockProfile profile_;
  bool differentiable_ = false;
  std::function<void()> on_asked_;  // when the backward asks for what was kept
};

std::vector<BlockProfile> measure_blocks(const std::vector<Segment>& blocks, const Tensor& input,
                                         int repeats) {
  // As in a replay, batch norms leave their statistics alone; the generator is put back.
  autograd::ThreadState state = autograd::ThreadState::capture();
  state.recomputing = true;
  state.grad_enabled = true;
  std::vector<BlockProfile> profile;
  Tensor x = input.detach();
  bool wants_gradient = input.requires_grad();
  for (const Segment& block : blocks) {
    const autograd::ThreadStateGuard guard(state);
    BlockMeter meter(block, x, wants_gradient);
    profile.push_back(meter.measure(repeats));
    x = meter.result();
    wants_gradient = meter.result_wants_gradient();
  }
  CAIRN_CHECK(wants_gradient, kPlanner,
              "expected blocks whose result depends on a parameter or an ",
              "input that requires a gradient, got a result without a graph");
  return profile;
}

// ---- Choosing

// The simple strategies: segments of each length, blocks recomputed from the first on, halves
// within halves.
SchedulePart recomputed_segment(std::size_t begin, std::size_t end) {
  SchedulePart part{begin, end, {}};
  for (std::size_t i = begin; i < end; ++i) part.inner.push_back({i, i + 1, {}});
  return part;
}

Schedule halves(std::size_t begin, std::size_t end) {
  Schedule schedule;
  for (; end - begin > 1; begin += (end - begin) / 2) {
    const std::size_t middle = begin + (end - begin) / 2;
    schedule.push_back({begin, middle, halves(begin, middle)});
  }
  schedule.push_back({begin, end, {}});
  return schedule;
}

std::vector<Schedule> simple_schedules(std::size_t n) {
  std::vector<Schedule> all{plain_schedule(n), halves(0, n)};
  for (std::size_t length = 1; length < n; ++length) {
    Schedule segments, first;
    std::size_t i = 0;
    for (; i + length < n; i += length) segments.push_back(recomputed_segment(i, i + length));
    for (; i < n; ++i) segments.push_back({i, i + 1, {}});
    for (i = 0; i < n; ++i) {
      first.push_back(i < length ? recomputed_segment(i, i + 1) : SchedulePart{i, i + 1, {}});
    }
    all.push_back(std::move(segments));
    all.push_back(std::move(first));
  }
  return all;
}

class BestSchedule {
 public:
  BestSchedule(const std::vector<BlockProfile>& profile, std::size_t room)
      : profile_(profile), room_(room) {}

  bool offer(const Schedule& schedule) {
    const ScheduleCost cost = simulate(profile_, schedule);
    smallest_ = std::min(smallest_, cost.peak);
    if (cost.peak > room_) return false;
    if (cost.seconds < seconds_) {
      seconds_ = cost.seconds;
      best_ = schedule;
    }
    return true;
  }
  const Schedule& best() const { return best_; }
  std::size_t smallest() const { return smallest_; }

 private:
  const std::vector<BlockProfile>& profile_;
  std::size_t room_;
  std::size_t smallest_ = SIZE_MAX;
  double seconds_ = std::numeric_limits<double>::infinity();
  Schedule best_;
};

// The programme is more careful than the simulation: the most memory whose schedule fits is taken.
void offer_programme(BestSchedule& choice, const std::vector<BlockProfile>& profile, int slots) {
  const ChainProgramme programme(profile, static_cast<std::size_t>(slots));
  for (std::size_t m = programme.steps() + 1; m-- > 0;) {
    const std::optional<Schedule> schedule = programme.schedule(m);
    if (!schedule || choice.offer(*schedule)) return;
  }
}

Schedule choose(const std::vector<BlockProfile>& profile, std::size_t standing, std::size_t budget,
                int slots) {
  BestSchedule choice(profile, budget > standing ? budget - standing : 0);
  for (const Schedule& schedule : simple_schedules(profile.size())) choice.offer(schedule);
  if (profile.size() <= ChainProgramme::kMostBlocks) offer_programme(choice, profile, slots);
  if (choice.best().empty()) {
    core::fail<core::OutOfMemory>(kPlanner, "expected a budget of at least ",
                                  standing + choice.smallest(), " bytes, of which ", standing,
                                  " stand when the step begins, got ", budget,
                                  " (smaller batches, or smaller blocks, take less)");
  }
  return choice.best();
}

Tensor run_schedule(const std::shared_ptr<const std::vector<Segment>>& blocks,
                    const std::shared_ptr<const Schedule>& whole, const Schedule& schedule,
                    Tensor x) {
  for (const SchedulePart& part : schedule) {
    if (part.inner.empty()) {
      x = (*blocks)[part.begin](x);
    } else {
      x = checkpoint([blocks, whole, inner = &part.inner](
                         const Tensor& y) { return run_schedule(blocks, whole, *inner, y); },
                     x);
    }
  }
  return x;
}

void write_schedule(std::ostream& out, const Schedule& schedule) {
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    if (i > 0) out << ' ';
    if (schedule[i].inner.empty()) {
      out << schedule[i].begin;
    } else {
      out << '[';
      write_schedule(out, schedule[i].inner);
      out << ']';
    }
  }
}

std::vector<Segment> modules_of(nn::Sequential& model) {
  std::vector<Segment> blocks;
  for (std::size_t i = 0; i < model.size(); ++i) {
    blocks.push_back([&module = model.at(i)](const Tensor& x) { return module(x); });
  }
  return blocks;
}

}  // namespace

RecomputationPlan::RecomputationPlan(std::vector<Segment> blocks, std::vector<BlockProfile> profile,
                                     Schedule schedule, std::size_t standing_bytes)
    : blocks_(std::make_shared<const std::vector<Segment>>(std::move(blocks))),
      profile_(std::move(profile)),
      schedule_(std::make_shared<const Schedule>(std::move(schedule))) {
  const ScheduleCost chosen = simulate(profile_, *schedule_);
  const ScheduleCost plain = simulate(profile_, plain_schedule(profile_.size()));
  peak_bytes_ = standing_bytes + chosen.peak;
  plain_peak_bytes_ = standing_bytes + plain.peak;
  seconds_ = chosen.seconds;
  plain_seconds_ = plain.seconds;
}

Tensor RecomputationPlan::run(const Tensor& x) const {
  return run_schedule(blocks_, schedule_, *schedule_, x);
}

void RecomputationPlan::apply(nn::Sequential& model) const {
  CAIRN_CHECK(model.size() == profile_.size(), kPlanner, "expected the planned Sequential of ",
              profile_.size(), " modules, got one of ", model.size());
  model.set_runner([schedule = schedule_](nn::Sequential& modules, const Tensor& x) {
    const auto blocks = std::make_shared<const std::vector<Segment>>(modules_of(modules));
    return run_schedule(blocks, schedule, *schedule, x);
  });
}

std::string RecomputationPlan::report() const {
  std::ostringstream out;
  out.precision(3);
  out << "blocks ";
  write_schedule(out, *schedule_);
  out << ": peak " << static_cast<double>(peak_bytes_) / 1e6 << " MB instead of "
      << static_cast<double>(plain_peak_bytes_) / 1e6 << " MB, step " << 1e3 * seconds_
      << " ms instead of " << 1e3 * plain_seconds_ << " ms (predicted)";
  return out.str();
}

RecomputationPlan plan_recomputation(const std::vector<Segment>& blocks, const Tensor& input,
                                     std::size_t budget, const PlanOptions& options) {
  CAIRN_CHECK(!blocks.empty(), kPlanner, "expected blocks, got none");
  CAIRN_CHECK(options.repeats > 0 && options.memory_slots > 0, kPlanner,
              "expected repeats and memory_slots above 0, got ", options.repeats, " and ",
              options.memory_slots);
  core::Stream::current(input.device()).synchronize();
  std::size_t standing = core::memory_stats(input.device()).current_total;
  std::vector<BlockProfile> profile = measure_blocks(blocks, input, options.repeats);
  for (BlockProfile& block : profile) {
    if (!options.accumulates) break;
    standing += std::exchange(block.parameter_gradients, 0);
  }
  Schedule schedule = choose(profile, standing, budget, options.memory_slots);
  return {blocks, std::move(profile), std::move(schedule), standing};
}

RecomputationPlan plan_recomputation(nn::Sequential& model, const Tensor& input, std::size_t budget,
                                     const PlanOptions& options) {
  // Inside of a call, so that the input is cast and autocast is on where they will be.
  std::optional<RecomputationPlan> plan;
  const nn::Sequential::Runner before = model.runner();
  model.set_runner([&](nn::Sequential& modules, const Tensor& x) {
    plan.emplace(plan_recomputation(modules_of(modules), x, budget, options));
    return x;
  });
  try {
    model(input);
  } catch (...) {
    model.set_runner(before);
    throw;
  }
  model.set_runner(before);
  return *plan;
}

}  // namespace cairn::checkpointing
