// How the passes that check make a PendingCheck.
#pragma once

#include <memory>

#include "cairn/kernels/multi_tensor.h"
#include "pending_result.h"

namespace cairn::kernels {

inline constexpr std::size_t kCheckWords = 3;
static_assert(sizeof(TensorCheck) == kCheckWords * sizeof(std::uint64_t));

struct PendingCheck::Impl {
  PendingResult result;
};

/// Launches work(backend, checks), which fills `count` > 0 checks in device memory.
template <class Work>
PendingCheck pending_check(Device device, std::size_t count, Work work) {
  auto impl = std::make_shared<PendingCheck::Impl>();
  impl->result =
      PendingResult::launch(device, count * kCheckWords,
                            [work = std::move(work)](const Backend& backend, std::uint64_t* words) {
                              work(backend, reinterpret_cast<TensorCheck*>(words));
                            });
  return PendingCheck(std::move(impl));
}

}  // namespace cairn::kernels
