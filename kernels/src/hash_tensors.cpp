#include "cairn/kernels/hash_tensors.h"

#include "list_check.h"
#include "pending_result.h"

namespace cairn::kernels {

std::vector<std::uint64_t> hash_tensors(const std::vector<TensorView>& tensors) {
  check_list("hash_tensors", "tensor", tensors);
  if (tensors.empty()) return {};
  const PendingResult hashes = PendingResult::launch(
      tensors[0].device, tensors.size(),
      [=](const Backend& backend, std::uint64_t* words) { backend.hash_tensors(tensors, words); });
  PendingResult::fetch({hashes});
  return hashes.host();
}

}  // namespace cairn::kernels
