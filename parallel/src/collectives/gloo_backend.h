// CPU tensors between processes: Gloo's TCP transport under the mesh collectives.
#pragma once

#include "collectives/collectives.h"
#include "collectives/membership.h"

namespace cairn::parallel {

/// Throws Unsupported in a build without Gloo, CommunicationError where a rank cannot be reached.
std::unique_ptr<Collectives> connect_gloo(const Membership& membership);

}  // namespace cairn::parallel
