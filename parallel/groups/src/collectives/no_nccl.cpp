#include "cairn/core/error.h"
#include "collectives/nccl_backend.h"

namespace cairn::parallel {

std::unique_ptr<Collectives> connect_nccl(const Membership& membership) {
  core::fail<core::Unsupported>(
      "group", "this build cannot send CUDA tensors between processes: ", membership.world_size,
      " ranks on ", membership.device,
      " need NCCL (install libnccl-dev, configure with -DCAIRN_CUDA=ON and build again)");
}

NcclPlace place_in(ncclComm*) {
  core::fail<core::Unsupported>("from_nccl",
                                "expected a build with NCCL, this one has none (install "
                                "libnccl-dev, configure with -DCAIRN_CUDA=ON and build again)");
}

std::vector<std::string> exchange_over(ncclComm* communicator, const std::string&,
                                       std::chrono::milliseconds) {
  place_in(communicator);
  return {};
}

std::string nccl_version() {
  return "";
}

}  // namespace cairn::parallel
