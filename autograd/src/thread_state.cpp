#include "cairn/autograd/thread_state.h"

#include <utility>

#include "cairn/core/generator.h"
#include "cast_cache.h"
#include "local.h"

namespace cairn::autograd {

Local& local() {
  thread_local Local state;
  return state;
}

ThreadState ThreadState::capture() {
  const Local& here = local();
  const Generator& generator = Generator::current();
  return {here.grad_enabled, here.autocast, generator.seed(), generator.offset(), here.recomputing};
}

void ThreadState::restore() const {
  Local& here = local();
  here.grad_enabled = grad_enabled;
  here.autocast = autocast;
  here.recomputing = recomputing;
  Generator::current().set(seed, offset);
}

bool grad_enabled() {
  return local().grad_enabled;
}
bool recomputing() {
  return local().recomputing;
}
const AutocastState& autocast_state() {
  return local().autocast;
}

GradModeGuard::GradModeGuard(bool enabled)
    : previous_(std::exchange(local().grad_enabled, enabled)) {}
GradModeGuard::~GradModeGuard() {
  local().grad_enabled = previous_;
}

AutocastGuard::AutocastGuard(bool enabled, DType dtype, bool cache) : previous_(local().autocast) {
  CAIRN_CHECK(core::is_half(dtype), "autocast", "expected f16 or bf16, got ", dtype);
  AutocastState& state = local().autocast;
  state.enabled = enabled;
  state.dtype = dtype;
  if (!cache) state.cache = nullptr;
  if (cache && !state.cache) state.cache = std::make_shared<CastCache>();
}

AutocastGuard::~AutocastGuard() {
  Local& here = local();
  const std::shared_ptr<CastCache> cache = std::move(here.autocast.cache);
  here.autocast = std::move(previous_);
  // A captured state, or a thread in it, may still hold the cache: it must not keep the copies.
  if (cache && here.autocast.cache != cache) cache->close();
}

}  // namespace cairn::autograd
