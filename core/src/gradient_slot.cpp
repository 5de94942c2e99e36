#include "cairn/core/gradient_slot.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/core/work_observer.h"

namespace cairn::core {

std::uint64_t next_scaler_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

GradientSlot::GradientSlot()
    : memory_(std::make_unique<Tensor>()), sum_(std::make_unique<Tensor>()) {}
GradientSlot::~GradientSlot() = default;

const Tensor& GradientSlot::memory() const {
  return *memory_;
}
const Tensor& GradientSlot::sum() const {
  return *sum_;
}

bool GradientSlot::holds_gradient() const {
  switch (state_) {
    case State::empty:
    case State::broken:
      return false;
    case State::local:
    case State::reduced:
      return true;
    case State::writing:
      return written_ || held_before();
  }
  return false;
}

Tensor GradientSlot::gradient() const {
  return holds_gradient() ? *memory_ : Tensor();
}

Tensor GradientSlot::whole_gradient(const std::string& name) const {
  CAIRN_CHECK(!holds_part(), "grad", "expected the whole gradient of '", name,
              "', got this rank's part of it, ", (holds_gradient() ? *memory_ : *sum_).numel(),
              " elements (ranks divide gradients: ZeroStage::optimizer_states keeps them whole)");
  if (!summed_) return gradient();
  CAIRN_CHECK(!holds_gradient(), "grad", "expected the whole gradient of '", name,
              "' in one place, got a part that still has its loss scale beside the sum of earlier ",
              "losses (precision.unscale(optimizer) adds them up; unscaled_gradient() copies)");
  return *sum_;
}

void GradientSlot::place(Tensor memory) {
  *memory_ = std::move(memory);
  placed_ = true;
}

void GradientSlot::displace() {
  placed_ = false;
  if (!holds_gradient()) drop_memory();
}

void GradientSlot::drop_memory() {
  *memory_ = Tensor();
  memory_is_part_ = false;
}

namespace {
std::string describe(const GradientScale& scale) {
  return scale.scaler == 0 ? "that nobody scaled" : str("scaled by ", scale.factor);
}
}  // namespace

bool GradientSlot::must_stash_for(const GradientScale& scale) const {
  if (!holds_gradient() || scale_.scaler != scale.scaler) return false;
  if (memory_is_part_) return true;
  if (scale_.factor != scale.factor) return true;
  return scale_.contribution && scale.contribution && scale_.contribution != scale.contribution;
}

bool GradientSlot::belongs_to_next(const GradientScale& scale) const {
  return holds_gradient() && !scale_.contribution && scale.contribution &&
         scale_.scaler == scale.scaler && scale_.factor == scale.factor;
}

void GradientSlot::begin(RunId run, const GradientScale& scale, const std::string& name) {
  if (state_ == State::writing && run_ == run) return;
  check_may_begin(scale, name);
  before_ = state_;
  state_ = State::writing;
  run_ = run;
  written_ = reduced_in_run_ = false;
  const auto former = std::exchange(scale_, scale);
  if (!scale_.contribution) scale_.contribution = former.contribution;
}

void GradientSlot::check_may_begin(const GradientScale& scale, const std::string& name) const {
  check_whole(name);
  const bool holds = holds_gradient() || summed_;
  CAIRN_CHECK(!holds || (scale_.scaler == scale.scaler && !must_stash_for(scale)), "backward",
              "expected gradients ", describe(scale_), " in '", name, "', got a loss ",
              describe(scale),
              " (precision.backward() for every loss of a step; or step, or clear_grad(), first)");
}

bool GradientSlot::write() {
  CAIRN_CHECK(state_ == State::writing, "gradient",
              "expected a slot that a backward has begun, got a write outside of one");
  if (std::exchange(written_, true)) return true;
  return held_before();
}

void GradientSlot::lend(Tensor memory) {
  *memory_ = std::move(memory);
}

void GradientSlot::adopt(Tensor gradient) {
  write();
  *memory_ = std::move(gradient);
}

void GradientSlot::set_own(Tensor gradient) {
  clear();
  *memory_ = std::move(gradient);
  if (state_ == State::writing) {
    before_ = State::local;
  } else {
    state_ = State::local;
  }
}

void GradientSlot::end() {
  if (state_ != State::writing) return;
  if (!written_) {
    state_ = reduced_in_run_ ? State::reduced : before_;
  } else {
    state_ = reduced_in_run_ ? State::reduced : State::local;
  }
  forget_scale_if_empty();
}

void GradientSlot::abort(const std::string& error) {
  if (state_ != State::writing) return;
  const bool changed = written_ || reduced_in_run_;
  const bool is_lost = !reducer_.expired();  // other ranks may have this run's
  state_ = is_lost || (changed && held_before()) ? State::broken : before_;
  if (state_ == State::broken) error_ = error;
  if (state_ != State::empty) return;
  if (!placed_) drop_memory();
  forget_scale_if_empty();
}

void GradientSlot::forget_scale_if_empty() {
  if (state_ != State::empty) return;
  scale_ = {summed_ ? scale_.scaler : 0};
}

bool GradientSlot::adds_to_reduced() const {
  return state_ == State::writing && (before_ == State::reduced || (summed_ && !sum_is_local_));
}

void GradientSlot::mark_reduced() {
  flow_ = WorkFlowGuard::current();
  reduced_in_run_ = state_ == State::writing;
  if (state_ == State::local) state_ = State::reduced;
}

void GradientSlot::keep_part(Tensor part) {
  if (!holds_gradient()) return;
  *memory_ = std::move(part);
  memory_is_part_ = true;
  mark_reduced();
}

void GradientSlot::keep_part_of_sum(Tensor part) {
  *sum_ = std::move(part);
  sum_is_part_ = true;
  mark_sum_reduced();
}

void GradientSlot::mark_sum_reduced() {
  sum_is_local_ = false;
}

void GradientSlot::mark_broken(const std::string& error) {
  if (!holds_gradient() && !summed_) return;
  state_ = State::broken;
  error_ = error;
}

void GradientSlot::mark_written(const GradientScale& scale) {
  state_ = State::local;
  scale_ = scale;
}

void GradientSlot::set_sum(Tensor memory) {
  *sum_ = std::move(memory);
}

void GradientSlot::release_sum() {
  *sum_ = Tensor();
  summed_ = sum_is_local_ = false;
  sum_contributions_.clear();
}

void GradientSlot::mark_stashed() {
  sum_is_part_ = memory_is_part_;
  sum_is_local_ = sum_is_local() || state_ == State::local;
  summed_ = true;
  state_ = State::empty;
  std::erase_if(sum_contributions_, [](const auto& one) { return one->over; });
  const auto known =
      std::find(sum_contributions_.begin(), sum_contributions_.end(), scale_.contribution);
  if (scale_.contribution && known == sum_contributions_.end())
    sum_contributions_.push_back(scale_.contribution);
  scale_ = {scale_.scaler};
  if (!placed_) drop_memory();
}

void GradientSlot::clear() {
  ++clears_;
  summed_ = sum_is_local_ = false;
  sum_contributions_.clear();
  written_ = reduced_in_run_ = false;
  if (!placed_) drop_memory();
  if (state_ == State::writing) {
    before_ = State::empty;
    return;
  }
  state_ = State::empty;
  scale_ = {};
  error_.clear();
}

void GradientSlot::check_whole(const std::string& name) const {
  if (state_ != State::broken) return;
  fail<Error>("gradient", "expected a whole gradient in '", name,
              "', got one that a backward or its reduction had changed in part when it failed (",
              error_, "): clear_grad() drops it");
}

bool GradientSlot::claim(const std::shared_ptr<const void>& optimizer) {
  const std::shared_ptr<const void> other = optimizer_.lock();
  if (other && other != optimizer) return false;
  optimizer_ = optimizer;
  return true;
}

}  // namespace cairn::core
