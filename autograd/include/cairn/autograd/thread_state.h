// What decides how an operation behaves on this thread: gradient mode, autocast, random generator.
// One struct, captured and restored whole, so that a replay (activation recomputation) or a helper
// thread cannot pick up half of it. New threads start with the defaults.
#pragma once

#include <cstdint>
#include <memory>

#include "cairn/core/dtype.h"

namespace cairn::autograd {

/// What autocast does with an operation's floating inputs (f64 is always left alone): half (matrix
/// products, convolutions) casts to the autocast dtype; f32 (sums, norms, losses, exponentials)
/// widens half inputs; promote casts all inputs to the widest of them, without autocast too; keep
/// takes them as they come; banned refuses half inputs.
enum class CastPolicy { keep, half, f32, promote, banned };

class CastCache;     // half copies of f32 leaves made inside one autocast region
class CastPolicies;  // what CastPolicyGuards around say of single operations

struct AutocastState {
  bool enabled = false;
  DType dtype = DType::f16;                      // f16 or bf16
  std::shared_ptr<CastCache> cache;              // null: every use casts again
  std::shared_ptr<const CastPolicies> policies;  // null: every operation's own
};

struct ThreadState {
  bool grad_enabled = true;
  AutocastState autocast;
  std::uint64_t seed = 0, offset = 0;  // of core::Generator::current()
  bool recomputing = false;  // inside the replay of a recomputed segment: batch norm leaves its
                             // running statistics alone

  static ThreadState capture();
  void restore() const;
};

/// Restores the state at the end of the scope, after switching to `state` at its start.
class [[nodiscard]] ThreadStateGuard {
 public:
  explicit ThreadStateGuard(const ThreadState& state) : previous_(ThreadState::capture()) {
    state.restore();
  }
  ~ThreadStateGuard() { previous_.restore(); }
  ThreadStateGuard(const ThreadStateGuard&) = delete;
  ThreadStateGuard& operator=(const ThreadStateGuard&) = delete;

 private:
  ThreadState previous_;
};

bool grad_enabled();
bool recomputing();
const AutocastState& autocast_state();

/// `GradModeGuard guard(false);` is no_grad: operations inside record nothing.
class [[nodiscard]] GradModeGuard {
 public:
  explicit GradModeGuard(bool enabled);
  ~GradModeGuard();
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  bool previous_;
};
struct [[nodiscard]] NoGradGuard : GradModeGuard {
  NoGradGuard() : GradModeGuard(false) {}
};

/// An autocast region. Casts of leaves are cached until the outermost region ends; the cache knows
/// the leaf's version and the gradient mode, so writes to a weight and no_grad evaluation inside a
/// region are right. Regions nest. A thread that restores a ThreadState captured in a region is in
/// that region too and shares its cache; where the region ends first, such a thread goes on and
/// casts anew at each use.
class [[nodiscard]] AutocastGuard {
 public:
  explicit AutocastGuard(bool enabled, DType dtype = DType::f16, bool cache = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState previous_;
};

}  // namespace cairn::autograd
