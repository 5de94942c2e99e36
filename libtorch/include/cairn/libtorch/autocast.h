// An autocast region of libtorch's own, as Python's `with torch.autocast(...)`.
//
//   {
//     const libtorch::AutocastGuard region(torch::kCPU, torch::kBFloat16);
//     loss = torch::nll_loss(net->forward(x), y);
//   }
//
// Of the calling thread. Regions nest; the casts of weights are cached until the outermost one
// ends, however it ends. Where the dtype is libtorch's default, Python's region gives the same
// bits.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace cairn::libtorch {

class [[nodiscard]] AutocastGuard {
 public:
  /// Throws InvalidArgument for a dtype other than f16 and bf16. cache false: every use casts
  /// again.
  AutocastGuard(c10::DeviceType device, c10::ScalarType dtype, bool enabled = true,
                bool cache = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_before_, cache_before_;
  c10::ScalarType dtype_before_;
};

}  // namespace cairn::libtorch
