// CUDA tensors: NCCL.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "collectives/collectives.h"
#include "store/membership.h"

struct ncclComm;

namespace cairn::parallel {

/// Throws Unsupported in a build without NCCL, CommunicationError where the ranks cannot connect.
std::unique_ptr<Collectives> connect_nccl(const Membership& membership);

/// A rank's place in a communicator of somebody else's.
struct NcclPlace {
  int rank = 0, ranks = 1;
  Device device;
};
/// Throws as connect_nccl, InvalidArgument for a null pointer.
NcclPlace place_in(ncclComm* communicator);
/// Every rank's text, in rank order, over the communicator in its GPU's current stream. At most 255
/// bytes. Throws CommunicationError where the others do not come within the timeout.
std::vector<std::string> exchange_over(ncclComm* communicator, const std::string& own,
                                       std::chrono::milliseconds timeout);

/// "2.28.3"; "" in a build without.
std::string nccl_version();

}  // namespace cairn::parallel
