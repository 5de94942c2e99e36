// TF32 by choice: whether f32 products and convolutions on CUDA may round their inputs to 10 bits
// of mantissa (f32 has 23), which lets tensor cores compute them several times faster. Sums stay
// f32; a product's relative error grows from about 1e-7 to about 1e-3.
//
// One setting for the process, read by each call as it is made, in whatever thread. Off at first,
// so that f32 means f32; CAIRN_TF32=1 in the environment turns it on. The CPU has no TF32: nothing
// changes there.
#pragma once

namespace cairn::kernels {

/// Throws InvalidArgument where CAIRN_TF32 is neither 0 nor 1.
bool tf32_allowed();
void allow_tf32(bool allowed);

}  // namespace cairn::kernels
