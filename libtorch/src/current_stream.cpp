#include "current_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "cairn/core/stream.h"

namespace cairn::libtorch {

void* torchs_current_stream(int index) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  return guard.getStream(device).native_handle();
}

void follow_torchs_streams() {
  static const bool once = [] {
    core::follow_current_stream(torchs_current_stream);
    return true;
  }();
  (void)once;
}

}  // namespace cairn::libtorch
