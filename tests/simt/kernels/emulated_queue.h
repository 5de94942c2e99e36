// What tests may tell the emulated queue.
#pragma once

namespace cairn::kernels::cuda {

/// Whether work counts as captured in a CUDA graph; it runs at once all the same.
bool& emulated_capture();

}  // namespace cairn::kernels::cuda
