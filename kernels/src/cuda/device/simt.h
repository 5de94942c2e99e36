// One dialect for device code: CUDA under nvcc; in plain C++ with CAIRN_SIMT_EMULATOR, the emulator
// of tests/simt.
//
//   SIMT_SHARED(float, tile, 32);          float tile[32] in the block's shared memory
//   SIMT_DYNAMIC_SHARED(float, values);    float* to the launch's dynamic shared memory, 16-byte
//   aligned
//   SIMT_UNROLL, SIMT_UNROLL_BY(2)         before a loop: wholly, or so many turns at a time
#pragma once

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define SIMT_SHARED(type, name, count) __shared__ type name[count]
#define SIMT_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char simt_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(simt_dynamic_shared)
#define SIMT_UNROLL _Pragma("unroll")
#define SIMT_PRAGMA(text) _Pragma(#text)
#define SIMT_UNROLL_BY(times) SIMT_PRAGMA(unroll times)

#elif defined(CAIRN_SIMT_EMULATOR)

#include "simt/emulator.h"

#define SIMT_UNROLL
#define SIMT_UNROLL_BY(times)

#else
#error "device code needs nvcc or CAIRN_SIMT_EMULATOR"
#endif
