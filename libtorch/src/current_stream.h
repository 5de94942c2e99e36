// libtorch's streams and Cairn's in one order.
#pragma once

namespace cairn::libtorch {

/// libtorch's current stream (cudaStream_t) of a CUDA device, in the calling thread.
void* torchs_current_stream(int index);

/// Cairn's current stream of a CUDA device is libtorch's from now on (core::follow_current_stream).
void follow_torchs_streams();

}  // namespace cairn::libtorch
