// Kernels with planted faults, and clean ones.
#pragma once

#include <cstdint>

namespace cairn::test {

void launch_fill(void* stream, float* data, int count, float value);
void launch_add(void* stream, const float* x, float* y, int count);  // y += x
void launch_copy_16_bytes(void* stream, const float* x, float* y);
void launch_shared_overrun(void* stream, float* y);
void launch_divergent_barrier(void* stream);
void launch_shift(void* stream, float* y, int count);               // y[0] = 1 << count
void launch_local_array(void* stream, float* y, int i);             // y[0] = element i of 4
void launch_sum_of_integers(void* stream, float* y, int a, int b);  // y[0] = a + b

}  // namespace cairn::test
