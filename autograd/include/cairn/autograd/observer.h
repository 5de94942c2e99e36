// Observers see every operation of the thread they are installed on: profilers, planners and
// explain reports are observers. Where none is installed, an operation pays one pointer test.
#pragma once

#include <cstdint>
#include <span>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/tensor.h"

namespace cairn::autograd {

enum class Phase { forward, backward, recompute };
const char* name(Phase phase);  // "forward"

/// One operation. The backward has one kind more, "accumulate_grad": a sum of gradients in a pass
/// of its own, where no operation could add to what was there.
struct OpEvent {
  const char* name = "";
  Phase phase = Phase::forward;
  Device device;
  DType dtype = DType::f32;      // of the first floating input, after casts; backward: of dy
  std::int64_t bytes_out = 0;    // of the result(s)
  std::int64_t bytes_saved = 0;  // kept for the backward
  std::int64_t casts = 0;        // inputs that a cast policy converted
  std::int64_t bytes_cast = 0;   // bytes written by those conversions
  std::int64_t cache_hits = 0;   // inputs whose half copy was there already
  std::int64_t host_ns = 0;      // time in the host's thread, in nanoseconds; end() only

  // How the dtype was chosen; forward and recompute only.
  CastPolicy policy = CastPolicy::keep;  // the one that applied
  bool autocast = false;                 // inside an enabled autocast region
  bool overridden = false;               // the policy is a CastPolicyGuard's, not the op's own

  // Valid during begin() and end() only.
  std::span<const Tensor> inputs;      // before casts; may hold undefined ones. Backward: dy
  std::span<const Tensor> outputs;     // end() only. Backward: the gradients, undefined where none
  std::span<const Tensor> parameters;  // the leaves among its inputs that want a gradient
};

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  /// Called before an operation runs, with what is known by then.
  virtual void begin(const OpEvent& event) { (void)event; }
  /// Called after it. May throw: the error leaves the operation or the backward that it came from.
  virtual void end(const OpEvent& event) = 0;
};

/// Installs an observer on this thread; null removes it. Returns the previous one.
OpObserver* set_observer(OpObserver* observer);

/// An observer that is installed for its life, in front of the one before, which goes on seeing
/// everything. Ends on the thread, and in the scope order, that it began in.
class [[nodiscard]] ScopedObserver : public OpObserver {
 public:
  ScopedObserver() : previous_(set_observer(this)) {}
  ~ScopedObserver() override { set_observer(previous_); }
  ScopedObserver(const ScopedObserver&) = delete;
  ScopedObserver& operator=(const ScopedObserver&) = delete;

  void begin(const OpEvent& event) final {
    if (previous_ != nullptr) previous_->begin(event);
    on_begin(event);
  }
  void end(const OpEvent& event) final {
    if (previous_ != nullptr) previous_->end(event);
    on_end(event);
  }

 protected:
  virtual void on_begin(const OpEvent& event) { (void)event; }
  virtual void on_end(const OpEvent& event) = 0;

 private:
  OpObserver* previous_;
};

}  // namespace cairn::autograd
