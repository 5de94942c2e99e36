// DLPack: tensors exchanged with other libraries (libtorch, NumPy, CuPy, JAX ...) without a copy.
// This header needs no dlpack.h; callers that look inside include their own (version 0.x layout:
// struct DLManagedTensor).
//
//   DLManagedTensor* out = core::to_dlpack(x);   // x's memory lives until out->deleter(out)
//   Tensor y = core::from_dlpack(theirs);        // the last tensor on it: theirs->deleter(theirs)
//
// Stream order of CUDA memory, as in the protocol of Python's arrays: whoever hands memory out is
// told the stream (cudaStream_t; null: the device's default stream) on which the receiver will use
// it.
#pragma once

#include "cairn/core/tensor.h"

struct DLManagedTensor;

namespace cairn::core {

/// Hands out the tensor's memory: shape, strides (in elements), dtype and device as they are. The
/// receiver calls the deleter once. Throws InvalidArgument for an undefined tensor. cpu:i (i > 0)
/// is exported as kDLCPU 0: elsewhere there is only one CPU.
///
/// On CUDA the receiver's stream waits for what the device's current stream has queued; and, at the
/// deleter, the stream that was current here waits for the receiver's, so that the memory is not
/// given to others before.
DLManagedTensor* to_dlpack(const Tensor& x, void* receivers_stream = nullptr);

/// Takes over `managed` (not null) and, on success only, the duty to call its deleter; after an
/// exception it is still the caller's. Null strides mean row-major. CPU and pinned memory arrive on
/// cpu:0, CUDA memory on cuda:i. Throws InvalidArgument for other devices, dtypes without a
/// counterpart (complex, i8, vector lanes ...), more than 8 dimensions, negative strides, and data
/// that its dtype's size does not align.
///
/// On CUDA the device's current stream waits for what the sender's stream has queued; and, before
/// the deleter is called, the sender's waits for the one that was current here.
Tensor from_dlpack(DLManagedTensor* managed, void* senders_stream = nullptr);

}  // namespace cairn::core
