#include "plan/block_meter.h"

#include <algorithm>
#include <any>
#include <chrono>
#include <functional>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/observer.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/offload.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "plan/operation_meter.h"

namespace cairn::checkpointing {

namespace {

// What a chain keeps is no burden to caches below the first, and in no cache beyond the second.
constexpr std::size_t kInTheCaches = 4 << 20, kPastTheCaches = 64 << 20;
constexpr int kRunsOfAKind = 3;  // before a block counts as one that was not seen yet

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

// The parameters that operations take; none has a gradient when it is first seen and afterwards.
class MeteredParameters : public autograd::ScopedObserver {
 public:
  explicit MeteredParameters(const char* op) : op_(op) {}
  ~MeteredParameters() override {
    clear();
    for (const Tensor& p : seen_) p.gradient_slot().displace();
  }
  MeteredParameters(const MeteredParameters&) = delete;
  MeteredParameters& operator=(const MeteredParameters&) = delete;

  /// Their gradients lie where products write them, as an optimizer's do.
  void place_gradients(bool sums) {
    for (const Tensor& p : seen_) {
      const DType dtype = sums ? DType::f32 : p.dtype();
      p.gradient_slot().place(Tensor::empty_strided(p.shape(), p.strides(), dtype, p.device()));
    }
  }

  void clear() {
    for (Tensor& p : seen_) p.clear_grad();
  }

 private:
  void on_begin(const autograd::OpEvent& event) override {
    if (event.phase != autograd::Phase::recompute) return;
    for (const Tensor& p : event.parameters) {
      if (!ids_.insert(p.id()).second) continue;
      CAIRN_CHECK(!p.grad().defined(), op_, "expected parameters without gradients, got one in '",
                  p.name(), "' (plan before the first backward, or after clear_grad())");
      seen_.push_back(p);
    }
  }
  void on_end(const autograd::OpEvent&) override {}

  const char* op_;
  std::vector<Tensor> seen_;
  std::unordered_set<const void*> ids_;
};

class BlockMeter {
 public:
  BlockMeter(const char* op, const Segment& block, const Tensor& x, bool wants_gradient,
             const MeterOptions& options)
      : op_(op), block_(block), options_(options), x_(x), device_(x.device()), parameters_(op) {
    if (wants_gradient) anchor_ = Tensor::zeros({1}, DType::f32, device_).set_requires_grad(true);
  }

  MeasuredBlock measure() {
    const std::size_t before = level();
    pass();  // the first run of anything is slow, and autocast keeps what it casts
    profile_.cached = level() - before;
    profile_.cached_and_kept = kept_casts();
    if (options_.placed) parameters_.place_gradients(options_.sums);
    if (options_.times_only) {
      step(profile_, block_);
      return {profile_, pass(), differentiable_};
    }
    if (options_.accumulates) step(profile_, block_);
    step(profile_, block_);
    profile_.lead = lead_;
    profile_.peak_before_loss = peak_before_loss_;
    MeteredForward forward = measure_operations(block_, input(x_), 1);
    const BlockProfile* known = known_as(forward);
    if (known == nullptr && options_.known != nullptr) {
      // What else the machine did may have made the one run slow.
      for (int i = 0; i < kRunsOfAKind; ++i) step(profile_, block_);
      known = known_as(forward);
    }
    if (known != nullptr) {
      profile_ = *known;
    } else {
      const double seconds = seconds_of(profile_);
      measure_ways();
      if (options_.known != nullptr) {
        options_.known->all.push_back(
            {x_.storage()->bytes(), std::move(forward), profile_, seconds});
      }
    }
    const Tensor result = pass();
    return {profile_, result, differentiable_};
  }

 private:
  static double seconds_of(const KeptBlock& kept) {
    return kept.forward_seconds + kept.backward_seconds;
  }

  // The memory, by one step.
  KeptBlock step_of(const Segment& run) {
    KeptBlock kept;
    step(kept, run);
    return kept;
  }

  struct Timed {
    KeptBlock& kept;  // what one step took
    Segment run;
  };

  // By turns, so that what else the machine does falls on all. The first keeps most.
  void time(const std::vector<Timed>& all) {
    std::vector<std::size_t> times(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) times[i] = runs_at_a_time(all[i].kept);
    if (times[0] > 1) run_times(all[0].run, times[0]);  // the first use of memory is slow
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (times[i] > 1) all[i].kept.forward_seconds = all[i].kept.backward_seconds = 0;
    }
    for (int repeat = 0; repeat < options_.repeats; ++repeat) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto [forward, backward] = run_times(all[i].run, times[i]);
        fastest(all[i].kept.forward_seconds, forward);
        fastest(all[i].kept.backward_seconds, backward);
      }
    }
  }

  // As many as keep what caches do not hold, and no more than the chain has or half of the memory
  // that is left has room for: what libraries take meanwhile (packed operands of products, which
  // leave holes in the heap) is not counted.
  std::size_t runs_at_a_time(const KeptBlock& kept) const {
    const std::size_t bytes = bytes_of(kept);
    if (device_.is_cuda() || bytes * options_.chain < kInTheCaches) return 1;
    const std::size_t capacity = core::memory_capacity(device_), standing = level();
    const std::size_t one = std::max(kept.forward_peak, kept.backward_peak) + x_.nbytes();
    const std::size_t room = (capacity - std::min(capacity, standing + one)) / 2;
    const std::size_t most = std::min(kPastTheCaches, room);
    return std::clamp<std::size_t>(most / (bytes + x_.nbytes()), 1, options_.chain);
  }

  // The seconds of a forward and of a backward, of so many one after another and back.
  std::pair<double, double> run_times(const Segment& run, std::size_t times) {
    std::vector<Tensor> losses;
    double forward = 0, backward = 0, begun = 0;
    for (std::size_t i = 0; i < times; ++i) {
      const Tensor x = times > 1 ? copy_of(x_) : x_;
      const double begin = now_seconds();
      const Tensor y = run(input(x));
      core::Stream::current(device_).synchronize();
      forward += now_seconds() - begin;
      if (!y.requires_grad()) continue;
      losses.push_back(autograd::apply(BlocksBehind{[&] {
                                         core::Stream::current(device_).synchronize();
                                         begun = now_seconds();
                                       }},
                                       y));
    }
    for (; !losses.empty(); losses.pop_back()) {
      autograd::backward(losses.back());
      core::Stream::current(device_).synchronize();
      backward += now_seconds() - begun;
      if (!options_.accumulates) parameters_.clear();
    }
    const auto count = static_cast<double>(times);
    return {forward / count, backward / count};
  }

  static Tensor copy_of(const Tensor& x) {
    if (!x.view().is_dense()) return x;
    Tensor copy = Tensor::empty_like(x);
    core::copy_bytes(x, copy);
    return copy;
  }

  const BlockProfile* known_as(const MeteredForward& forward) const {
    if (options_.known == nullptr) return nullptr;
    for (const KnownBlocks::Known& known : options_.known->all) {
      const double share = seconds_of(profile_) / known.seconds;
      const bool alike = share > 0.5 && share < 2 && same_memory(known);
      if (alike && forward.same_operations(known.forward)) return &known.profile;
    }
    return nullptr;
  }

  bool same_memory(const KnownBlocks::Known& known) const {
    const auto memory = [](std::size_t input, const BlockProfile& b) {
      return std::tuple(input, b.saved, b.saves_input, b.saves_output, b.forward_peak,
                        b.replay_peak, b.backward_peak, b.output, b.light_peak, b.gradient, b.lead,
                        b.cached, b.cached_and_kept, b.parameter_gradients);
    };
    return memory(x_.storage()->bytes(), profile_) == memory(known.input, known.profile);
  }

  void measure_ways() {
    const std::size_t lead = lead_;
    static_cast<KeptBlock&>(profile_) = step_of(block_);
    const auto results = std::make_shared<const std::vector<SegmentOperation>>();
    const Segment again = [&](const Tensor& x) { return run_selective(block_, x, results); };
    const Segment elsewhere = [&](const Tensor& x) {
      return run_offloaded(block_, x, *options_.offload);
    };
    std::vector<Timed> timed{{profile_, block_}};
    KeptBlock recomputed, offloaded;
    if (differentiable_) {
      recomputed = step_of(again);
      timed.push_back({recomputed, again});
    }
    if (options_.offload != nullptr) {
      offloaded = step_of(elsewhere);
      offloaded.replay_peak = offloaded.forward_peak;  // its own hooks see what it keeps
      timed.push_back({offloaded, elsewhere});
    }
    profile_.lead = lead;
    time(timed);
    if (options_.offload != nullptr && bytes_of(offloaded) < bytes_of(profile_)) {
      profile_.offloaded = offloaded;
    }
    if (differentiable_) measure_selective(seconds_of(recomputed));
  }

  // A replay takes more than a kept block by its share of what the replay of all takes: operations
  // are compared within one run, where steps of different ways differ by what else the machine did.
  void measure_selective(double recomputed_seconds) {
    const MeteredForward metered = measure_operations(block_, input(x_), options_.repeats);
    // Of another run: what else the machine did then must not make a replay take less than nothing.
    profile_.tail_seconds = std::min(metered.tail_seconds, profile_.forward_seconds);
    const double replay = std::max(0.0, recomputed_seconds - seconds_of(profile_));
    for (const KeptResults& results : metered.selections()) {
      SelectiveBlock way;
      static_cast<KeptBlock&>(way) =
          step_of([&](const Tensor& x) { return run_selective(block_, x, results); });
      if (bytes_of(way) >= bytes_of(profile_)) continue;
      way.forward_seconds = profile_.forward_seconds;
      way.backward_seconds = profile_.backward_seconds + metered.replayed_share(results) * replay;
      way.tail_seconds = std::min(metered.tail_seconds_of(results), way.forward_seconds);
      way.results = results;
      profile_.selective.push_back(std::move(way));
    }
  }

  std::size_t bytes_of(const KeptBlock& kept) const {
    return kept.saved + (kept.saves_input ? x_.nbytes() : 0) +
           (kept.saves_output ? profile_.output : 0);
  }

  Tensor input(const Tensor& x) const {
    return anchor_.defined() ? autograd::apply(BlockBefore{}, anchor_, x) : x;
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
    const Tensor y = block_(input(x_));
    profile_.light_peak = peak() - base;
    CAIRN_CHECK(y.defined() && y.device() == device_, op_, "expected blocks with a result on ",
                device_, ", got another one");
    profile_.output = y.storage() == x_.storage() ? 0 : y.storage()->bytes();
    profile_.gradient = y.nbytes();
    return y.detach();
  }

  // What the graph holds more where no region has the half copies of weights.
  std::size_t kept_casts() {
    if (profile_.cached == 0) return 0;
    const auto held = [this] {
      SavedStorages saved;
      const std::size_t base = level();
      const Tensor y = forward(saved, block_);
      return level() - base;
    };
    const std::size_t beside_region = held();
    autograd::ThreadState state = autograd::ThreadState::capture();
    state.autocast.cache = nullptr;
    const autograd::ThreadStateGuard guard(state);
    return std::min(profile_.cached, held() - beside_region);
  }

  // Forward and backward as in a chain, of what `run` keeps.
  void step(KeptBlock& kept, const Segment& run) {
    SavedStorages saved;
    const std::size_t base = level();
    core::reset_peak_memory(device_);
    saved.peak = base;
    const double begin = now_seconds();
    Tensor y = forward(saved, run);
    const std::size_t forward_peak = peak() - base;
    fastest(kept.forward_seconds, now_seconds() - begin);
    kept.forward_peak = forward_peak;
    if (options_.before_loss != nullptr)
      peak_before_loss_ = std::max(*options_.before_loss, base) - base;
    kept.replay_peak = saved.peak - base;
    kept.saves_input = saved.all.contains(x_.storage().get());
    kept.saves_output = profile_.output > 0 && saved.all.contains(y.storage().get());
    differentiable_ = y.requires_grad();
    if (!differentiable_) return;
    double backward_begin = 0;
    std::size_t begin_level = 0;
    Tensor loss = autograd::apply(BlocksBehind{[&] {
                                    core::Stream::current(device_).synchronize();
                                    core::reset_peak_memory(device_);
                                    begin_level = level();
                                    backward_begin = now_seconds();
                                  }},
                                  y);
    y = Tensor();
    kept.saved = level() - base - loss.nbytes() - (kept.saves_output ? profile_.output : 0);
    bool asked = false;
    on_asked_ = [&] {
      if (!std::exchange(asked, true)) lead_ = level() - begin_level;
    };
    autograd::backward(loss);
    on_asked_ = nullptr;
    kept.backward_peak = peak() - base - loss.nbytes();
    fastest(kept.backward_seconds, now_seconds() - backward_begin);
    loss = Tensor();
    if (level() > base) profile_.parameter_gradients = level() - base;
    if (!options_.accumulates) parameters_.clear();
  }

  // What a parameter is saved as is no business of replays.
  struct Kept {
    autograd::SavedTensor tensor;
    bool parameter;
  };

  struct SavedStorages {
    std::unordered_set<const core::Storage*> all;
    std::size_t peak = 0;  // of the device, when the last one was saved
  };

  Tensor forward(SavedStorages& saved, const Segment& run) {
    const autograd::SavedTensorHooksGuard hooks(
        {[&](const Tensor& x) -> std::any {
           const bool parameter = autograd::is_parameter(x);
           if (!parameter) {
             saved.all.insert(x.storage().get());
             saved.peak = peak();
           }
           return std::make_shared<Kept>(Kept{autograd::SavedTensor(x), parameter});
         },
         [this](const std::any& value) {
           const auto& kept = std::any_cast<const std::shared_ptr<Kept>&>(value);
           if (!kept->parameter) on_asked_();
           return kept->tensor.unpack(op_);
         }});
    return run(input(x_));
  }

  static void fastest(double& seconds, double measured) {
    seconds = seconds == 0 ? measured : std::min(seconds, measured);
  }

  const char* op_;
  const Segment& block_;
  MeterOptions options_;
  Tensor x_, anchor_;
  Device device_;
  MeteredParameters parameters_;
  BlockProfile profile_;
  bool differentiable_ = false;
  std::size_t lead_ = 0;  // of the last step: what stood when the backward asked for the first time
  std::size_t peak_before_loss_ = 0;  // of the last step
  std::function<void()> on_asked_;    // when the backward asks for what was kept
};

}  // namespace

std::shared_ptr<Offload> planned_offload(std::optional<OffloadOptions> options) {
  if (!options) return nullptr;
  options->fetch_ahead = false;
  return std::make_shared<Offload>(std::move(*options));
}

Tensor run_offloaded(const Segment& block, const Tensor& x, Offload& offload) {
  Tensor y;
  {
    const autograd::SavedTensorHooksGuard hooks(offload.hooks());
    y = block(x);
  }
  offload.synchronize();
  return y;
}

Tensor run_selective(const Segment& block, const Tensor& x, const KeptResults& results) {
  if (results->empty()) return checkpoint(block, x);
  const auto policy = [results](const SegmentOperation& operation) {
    const bool kept = std::find(results->begin(), results->end(), operation) != results->end();
    return kept ? Treatment::must_save : Treatment::must_recompute;
  };
  return checkpoint(block, x, {.policy = policy});
}

MeasuredBlock measure_block(const char* op, const Segment& block, const Tensor& x,
                            bool wants_gradient, const MeterOptions& options) {
  autograd::ThreadState state = autograd::ThreadState::capture();
  state.recomputing = true;
  state.grad_enabled = true;
  const autograd::ThreadStateGuard guard(state);
  return BlockMeter(op, block, x, wants_gradient, options).measure();
}

std::vector<BlockProfile> measure_blocks(const char* op, const std::vector<Segment>& blocks,
                                         const Tensor& input, const MeterOptions& options) {
  std::vector<BlockProfile> profile;
  KnownBlocks known;
  MeterOptions own = options;
  own.known = &known;
  own.chain = blocks.size();
  MeasuredBlock last{{}, input.detach(), input.requires_grad()};
  for (const Segment& block : blocks) {
    if (own.budget != nullptr) own.budget->refresh();
    last = measure_block(op, block, last.result, last.result_wants_gradient, own);
    profile.push_back(last.profile);
  }
  CAIRN_CHECK(last.result_wants_gradient, op,
              "expected blocks whose result depends on a parameter or an ",
              "input that requires a gradient, got a result without a graph");
  return profile;
}

}  // namespace cairn::checkpointing
