// CUDA tensors: NCCL.
#pragma once

#include "collectives/collectives.h"
#include "store/membership.h"

namespace cairn::parallel {

/// Throws Unsupported in a build without NCCL, CommunicationError where the ranks cannot connect.
std::unique_ptr<Collectives> connect_nccl(const Membership& membership);

/// "2.28.3"; "" in a build without.
std::string nccl_version();

}  // namespace cairn::parallel
