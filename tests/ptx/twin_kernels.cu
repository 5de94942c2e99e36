// Kernels of one warp around the functions that have one body for nvcc and another one for the
// emulator. nvcc makes PTX of this file and a library of twins.cu, which launches them.
#include "cuda/device/async_copy.cuh"
#include "cuda/device/online_softmax.cuh"
#include "cuda/device/tile.cuh"
#include "ptx/twins.h"

namespace cairn::kernels::cuda {

namespace {

template <class T>
__device__ const T* input(const void* in) {
  return static_cast<const T*>(in) + lane_index();
}
template <class T>
__device__ T* output(void* out) {
  return static_cast<T*>(out) + lane_index();
}

template <bool Transposed>
__device__ void load_matrices_twin(const void* in, void* out) {
  SIMT_SHARED(Sixteen, rows, 32);
  rows[lane_index()] = *input<Sixteen>(in);
  __syncwarp();
  Sixteen words;
  load_matrices<Transposed>(words.words, rows + (5 * lane_index() + 3) % 32);
  *output<Sixteen>(out) = words;
}

template <class T>
__device__ void multiply_add_twin(const void* in, void* out) {
  ProductOfLane product = *input<ProductOfLane>(in);
  multiply_add<T>(product.sums, product.a, product.b[0], product.b[1]);
  SIMT_UNROLL
  for (int i = 0; i < 4; ++i) static_cast<float*>(out)[4 * lane_index() + i] = product.sums[i];
}

/// Pairs, then what was narrowed and widened singly, then that narrowed once more.
template <class T>
__device__ void conversions_twin(const void* in, void* out) {
  const float first = input<float>(in)[0], second = input<float>(in)[32];
  const auto pair = narrow_pair<T>(first, second);
  std::uint32_t word;
  memcpy(&word, &pair, 4);
  *output<std::uint32_t>(out) = word;
  const float widened = widen(narrow<T>(second));
  output<float>(out)[32] = widened;
  static_cast<T*>(out)[128 + lane_index()] = narrow<T>(widened);
}

/// a b^T, and that times c, of 16 x 32 matrices.
template <class T>
__device__ void tiles_twin(const void* in, void* out) {
  constexpr int kStride = tile_stride<T, 32>;
  SIMT_DYNAMIC_SHARED(T, rows);
  SIMT_UNROLL
  for (int i = 0; i < 48; ++i) rows[i * kStride + lane_index()] = input<T>(in)[32 * i];
  __syncwarp();
  Sums<1, 16> scores = {};
  add_product_transposed<32>(scores, rows, rows + 16 * kStride);
  Sums<1, 32> y = {};
  add_product(y, scores, rows + 32 * kStride);
  auto* const results = static_cast<float*>(out);
  scores.each([&](float& x, int m, int j, int i) {
    results[scores.row(m, i) * 16 + scores.column(j, i)] = x;
  });
  y.each(
      [&](float& x, int m, int j, int i) { results[256 + y.row(m, i) * 32 + y.column(j, i)] = x; });
}

}  // namespace

extern "C" {

__global__ void move_16_bytes(const void* in, void* out) {
  store_16(output<Sixteen>(out), load_16(input<Sixteen>(in)));
}

/// What lies in shared memory while copies are on their way, and after them what this lane copied
/// and what another one did.
__global__ void copy_async(const void* in, void* out) {
  SIMT_SHARED(Sixteen, shared, 64);
  Sixteen* const own = shared + lane_index();
  copy_async_16(own, input<Sixteen>(in));
  copy_async_16(own + 32, input<Sixteen>(in) + 32);
  const Sixteen under_way = *own;
  wait_for_copies();
  const Sixteen arrived = *own;
  output<Sixteen>(out)[0] = under_way;
  output<Sixteen>(out)[32] = arrived;
  __syncwarp();
  output<Sixteen>(out)[64] = shared[63 - lane_index()];
}

__global__ void load_rows(const void* in, void* out) {
  load_matrices_twin<false>(in, out);
}
__global__ void load_columns(const void* in, void* out) {
  load_matrices_twin<true>(in, out);
}
__global__ void multiply_f16(const void* in, void* out) {
  multiply_add_twin<Half>(in, out);
}
__global__ void multiply_bf16(const void* in, void* out) {
  multiply_add_twin<BFloat16>(in, out);
}
__global__ void convert_f16(const void* in, void* out) {
  conversions_twin<Half>(in, out);
}
__global__ void convert_bf16(const void* in, void* out) {
  conversions_twin<BFloat16>(in, out);
}
__global__ void powers_of_two(const void* in, void* out) {
  *output<float>(out) = power_of_two(*input<float>(in));
}
__global__ void tiles_f16(const void* in, void* out) {
  tiles_twin<Half>(in, out);
}
__global__ void tiles_bf16(const void* in, void* out) {
  tiles_twin<BFloat16>(in, out);
}

}  // extern "C"
}  // namespace cairn::kernels::cuda
