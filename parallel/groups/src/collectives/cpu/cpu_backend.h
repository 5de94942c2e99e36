// The engine of CPU tensors between processes: shared memory on one host, a network engine between
// hosts.
#pragma once

#include "collectives/collectives.h"
#include "store/membership.h"

namespace cairn::parallel {

/// Throws InvalidArgument for a value of CAIRN_BACKEND that there is not, Unsupported for an engine
/// that cannot serve these ranks, CommunicationError where a rank cannot be reached.
std::unique_ptr<Collectives> connect_cpu(const Membership& membership);

}  // namespace cairn::parallel
