// The instruction sets that the vector loops are compiled for: AVX-512, AVX2 and the baseline
// (scalar code on x86-64, NEON on 64-bit Arm). Highway picks one at run time, so one binary serves
// all. Define HWY_TARGET_INCLUDE first; see simd.h.
#ifndef CAIRN_KERNELS_CPU_TARGETS_H_
#define CAIRN_KERNELS_CPU_TARGETS_H_
// A vector of SVE has no size at compile time, so that no struct can hold one.
#define CAIRN_SVE_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | CAIRN_SVE_TARGETS)
#include "hwy/foreach_target.h"
#if defined(HWY_COMPILE_ONLY_STATIC) && HWY_ARCH_X86 && HWY_STATIC_TARGET != HWY_AVX2
#error "expected the flags of AVX2 as Highway has it (kernels/CMakeLists.txt)"
#endif
#endif
