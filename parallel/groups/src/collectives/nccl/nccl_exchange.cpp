// What ranks tell each other over a communicator that is not ours.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "collectives/nccl_backend.h"
#include "pause.h"

namespace cairn::parallel {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kWhere = "from_nccl";
constexpr std::size_t kBytes = 256;  // of a rank, the text's end included

void must(ncclResult_t result) {
  if (result != ncclSuccess && result != ncclInProgress)
    core::fail<core::CommunicationError>(kWhere,
                                         "the communicator failed: ", ncclGetErrorString(result));
}

ncclResult_t state_of(ncclComm_t communicator) {
  ncclResult_t state = ncclSuccess;
  must(ncclCommGetAsyncError(communicator, &state));
  must(state);
  return state;
}

template <class Done>
void wait_until(Done&& done, int ranks, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (Pause pause; !done(); pause()) {
    if (Clock::now() > deadline)
      core::fail<core::CommunicationError>(kWhere, "expected the ", ranks,
                                           " ranks of the communicator within ", timeout.count(),
                                           " ms, not all came (each calls from_nccl())");
  }
}

}  // namespace

NcclPlace place_in(ncclComm* communicator) {
  CAIRN_CHECK(communicator != nullptr, kWhere, "expected a communicator, got a null pointer");
  NcclPlace place;
  int gpu = 0;
  must(ncclCommUserRank(communicator, &place.rank));
  must(ncclCommCount(communicator, &place.ranks));
  must(ncclCommCuDevice(communicator, &gpu));
  place.device = {core::DeviceType::cuda, gpu};
  return place;
}

std::vector<std::string> exchange_over(ncclComm* communicator, const std::string& own,
                                       std::chrono::milliseconds timeout) {
  CAIRN_CHECK(own.size() < kBytes, kWhere, "expected at most ", kBytes - 1, " bytes, got ",
              own.size());
  const NcclPlace place = place_in(communicator);
  const core::DeviceGuard guard(place.device);
  const core::Stream stream = core::Stream::current(place.device);
  const auto ranks = static_cast<std::size_t>(place.ranks);
  std::vector<std::uint8_t> bytes(own.begin(), own.end());
  bytes.resize(kBytes);
  const Tensor x = Tensor::from(bytes, {std::ssize(bytes)}, DType::u8, place.device);
  const Tensor y = Tensor::empty({place.ranks * std::ssize(bytes)}, DType::u8, place.device);
  must(ncclAllGather(x.view().data, y.view().data, kBytes, ncclUint8, communicator,
                     static_cast<cudaStream_t>(stream.native())));
  wait_until([&] { return state_of(communicator) == ncclSuccess; }, place.ranks, timeout);
  core::Event done(place.device);
  done.record(stream);
  wait_until([&] { return state_of(communicator) == ncclSuccess && done.done(); }, place.ranks,
             timeout);
  const std::vector<double> all = y.to_vector();
  std::vector<std::string> texts(ranks);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != 0.0) texts[i / kBytes] += static_cast<char>(all[i]);
  }
  return texts;
}

}  // namespace cairn::parallel
