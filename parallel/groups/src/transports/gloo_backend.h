// A mesh over Gloo's TCP transport.
#pragma once

#include "store/membership.h"
#include "transports/mesh.h"

namespace cairn::parallel {

/// Throws Unsupported in a build without Gloo, CommunicationError where a rank cannot be reached.
std::unique_ptr<Mesh> connect_gloo(const Membership& membership);

/// "0.5.0"; "" in a build without.
std::string gloo_version();

}  // namespace cairn::parallel
