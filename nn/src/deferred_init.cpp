#include "cairn/nn/deferred_init.h"

#include <utility>

namespace cairn::nn {
namespace {

thread_local bool is_active = false;

}  // namespace

DeferredInit::DeferredInit() : before_(std::exchange(is_active, true)) {}

DeferredInit::~DeferredInit() {
  is_active = before_;
}

bool DeferredInit::active() {
  return is_active;
}

}  // namespace cairn::nn
