#include "cairn/optim/accumulation.h"

#include <cmath>
#include <exception>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::optim {

constexpr const char* kCount = "the samples of a window";

MicroBatch::MicroBatch(Accumulation* owner, double weight, bool last)
    : owner_(owner), weight_(weight), last_(last), exceptions_(std::uncaught_exceptions()) {}

MicroBatch::MicroBatch(MicroBatch&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      weight_(other.weight_),
      last_(other.last_),
      exceptions_(other.exceptions_) {}

MicroBatch::~MicroBatch() {
  if (owner_ == nullptr || std::uncaught_exceptions() <= exceptions_) return;
  owner_->abandoned_ = true;
  try {
    owner_->options_.world.synchronize(true);
  } catch (...) {  // NOLINT: the exception in flight says what went wrong
  }
}

Accumulation::Accumulation(const AccumulationOptions& options) : options_(options) {
  CAIRN_CHECK(options.tokens >= 0, "Accumulation", "expected tokens >= 0, got ", options.tokens);
  CAIRN_CHECK(options.tokens > 0 || options.steps >= 1, "Accumulation",
              "expected steps >= 1 or tokens > 0, got ", options.steps, " and ", options.tokens);
}

Accumulation::~Accumulation() {
  if (!open()) return;
  try {
    options_.world.synchronize(true);
  } catch (...) {  // NOLINT: a destructor
  }
}

void Accumulation::check_may_begin(std::int64_t count) const {
  CAIRN_CHECK(!abandoned_, "Accumulation", "expected a whole window, got one that an exception ",
              "ended in micro-batch ", micro_batches_,
              " (clear the optimizer's gradients and reset())");
  CAIRN_CHECK(!at_boundary_, "Accumulation", "expected finish() and a step after micro-batch ",
              micro_batches_, " of the window, got begin()");
  CAIRN_CHECK(count >= 0, "Accumulation", "expected a count >= 0, got ", count);
}

MicroBatch Accumulation::begin(std::int64_t count, const BeginOptions& options) {
  check_may_begin(count);
  const bool by_tokens = options_.tokens > 0;
  const auto ranks = static_cast<double>(options_.world.size);
  const auto own = static_cast<double>(count);
  const bool knows_all = by_tokens || reference_ == 0;
  const double everywhere = knows_all ? options_.world.sum(own, kCount) : own;
  CAIRN_CHECK(!knows_all || everywhere > 0, "Accumulation",
              "expected samples on some rank, got a count of 0 on all ", ranks);
  if (reference_ == 0) reference_ = everywhere / ranks;

  own_ += own;
  seen_ += by_tokens ? everywhere : own;
  ++micro_batches_;
  at_boundary_ = options.last || (by_tokens ? seen_ >= static_cast<double>(options_.tokens)
                                            : micro_batches_ == options_.steps);
  options_.world.synchronize(at_boundary_);
  return MicroBatch(this, own / reference_, at_boundary_);
}

double Accumulation::finish() {
  CAIRN_CHECK(!abandoned_, "Accumulation", "expected a whole window, got one that an exception ",
              "ended (clear the optimizer's gradients and reset())");
  CAIRN_CHECK(at_boundary_, "Accumulation", "expected finish() after the last micro-batch, got it ",
              "after ", micro_batches_,
              " (at the end of an epoch: begin(count, {.last = true}) for its last micro-batch)");
  const double total = options_.tokens > 0 ? seen_ : options_.world.sum(own_, kCount);
  const auto ranks = static_cast<double>(options_.world.size);
  CAIRN_CHECK(total > 0, "Accumulation", "expected samples in the window, got none in ",
              micro_batches_, " micro-batches on any rank (reset() and clear the gradients)");
  const double factor = reference_ / total * (options_.world.reduces_gradients() ? ranks : 1.0);
  reference_ = total / (static_cast<double>(micro_batches_) * ranks);
  end_window();
  return factor;
}

void Accumulation::reset() {
  end_window();
  options_.world.synchronize(true);
}

void Accumulation::end_window() {
  own_ = seen_ = 0;
  micro_batches_ = 0;
  at_boundary_ = abandoned_ = false;
}

StateDict Accumulation::state_dict() const {
  CAIRN_CHECK(!open(), "Accumulation", "expected to be saved at a boundary, got a window with ",
              micro_batches_, " micro-batches (save after the step)");
  StateDict state;
  state.set("reference", reference_);
  return state;
}

void Accumulation::load_state_dict(const StateDict& state) {
  const double reference = state.number("reference");
  if (!std::isfinite(reference) || reference < 0) {
    core::fail<core::DataError>("Accumulation", "expected a finite reference >= 0, got ",
                                reference);
  }
  reset();  // a window that was open belongs to the run before
  reference_ = reference;
}

}  // namespace cairn::optim
