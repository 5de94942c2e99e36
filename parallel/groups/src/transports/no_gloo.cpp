#include "cairn/core/error.h"
#include "transports/gloo_backend.h"

namespace cairn::parallel {

std::unique_ptr<Mesh> connect_gloo(const Membership& membership) {
  core::fail<core::Unsupported>(
      "group", "this build cannot send CPU tensors between hosts: ", membership.world_size,
      " ranks need Gloo (apt-get install libgloo-dev, configure and build again)");
}

std::string gloo_version() {
  return "";
}

}  // namespace cairn::parallel
