// The cells of an LSTM, N units of a sequence a thread: each element is read and written once.
#pragma once

#include "cuda/device/convert.cuh"
#include "cuda/device/packed.cuh"
#include "math/lstm.h"

namespace cairn::kernels::cuda {

template <int N, class A, class T>
__device__ __forceinline__ Packed<A, N> read_units(const T* x) {
  if constexpr (N == 1) {
    return {{static_cast<A>(widen(*x))}};
  } else {
    return widened<A>(load_pack<N>(x));
  }
}
template <int N, class T, class A>
__device__ __forceinline__ void write_units(const Packed<A, N>& values, T* y) {
  if constexpr (N == 1) {
    *y = narrow<T>(values[0]);
  } else {
    store_pack<N>(y, narrowed<T>(values));
  }
}

/// The gates of N units.
template <int N, class A>
struct GatesOfUnits {
  Packed<A, N> i, f, g, o;

  template <class T>
  __device__ static GatesOfUnits read(const T* x, std::int64_t stride) {
    return {read_units<N, A>(x), read_units<N, A>(x + stride), read_units<N, A>(x + 2 * stride),
            read_units<N, A>(x + 3 * stride)};
  }
  template <class T>
  __device__ void write(T* y, std::int64_t stride) const {
    write_units(i, y);
    write_units(f, y + stride);
    write_units(g, y + 2 * stride);
    write_units(o, y + 3 * stride);
  }
  __device__ math::LstmGates<A> of(int k) const { return {i[k], f[k], g[k], o[k]}; }
  __device__ void set(int k, const math::LstmGates<A>& gates) {
    i[k] = gates.i, f[k] = gates.f, g[k] = gates.g, o[k] = gates.o;
  }
};

/// Which sequences take part in a step.
struct LstmTime {
  const std::int64_t* lengths;  // null: all
  std::int64_t t;
  __device__ bool inside(std::int64_t b) const { return lengths == nullptr || t < lengths[b]; }
};

template <class T>
struct LstmCell {
  using A = Arithmetic<T>;
  std::int64_t H;
  LstmTime time;
  T* gates;
  const A* hidden;
  A* carry;
  const T* h_before;
  T* h;
  T* c;

  /// Units [at, at + N) of [B, H], of one sequence.
  template <int N>
  __device__ void run(std::int64_t at) const {
    const std::int64_t b = at / H, gate = at + 3 * b * H;
    Packed<A, N> state = read_units<N, A>(carry + at), result;
    if (!time.inside(b)) {
      result = read_units<N, A>(h_before + at);
    } else {
      auto x = GatesOfUnits<N, A>::read(gates + gate, H);
      const auto y = GatesOfUnits<N, A>::read(hidden + gate, H);
      SIMT_UNROLL
      for (int k = 0; k < N; ++k) {
        const math::LstmGates<A> p = x.of(k), q = y.of(k);
        const auto all = math::LstmGates<A>{p.i + q.i, p.f + q.f, p.g + q.g, p.o + q.o}.activated();
        const math::LstmUnit<A> unit = math::lstm_unit(all, state[k]);
        x.set(k, all);
        state[k] = unit.c;
        result[k] = unit.h;
      }
      x.write(gates + gate, H);
      write_units(state, carry + at);
    }
    write_units(state, c + at);
    write_units(result, h + at);
  }
};

template <class T>
struct LstmCellBackward {
  using A = Arithmetic<T>;
  std::int64_t H;
  LstmTime time;
  T* gates;
  const T* c_before;
  const T* c;
  const T* dy;
  A* dh;
  A* dc;

  template <int N>
  __device__ void run(std::int64_t at) const {
    const std::int64_t b = at / H, gate = at + 3 * b * H;
    const bool inside = time.inside(b);
    auto x = GatesOfUnits<N, A>::read(gates + gate, H);
    const auto before = read_units<N, A>(c_before + at), after = read_units<N, A>(c + at),
               from_above = read_units<N, A>(dy + at);
    auto of_h = read_units<N, A>(dh + at), of_c = read_units<N, A>(dc + at);
    SIMT_UNROLL
    for (int k = 0; k < N; ++k) {
      const A d = of_h[k] + from_above[k];
      const auto through = math::lstm_unit_backward(x.of(k), before[k], after[k], d, of_c[k]);
      x.set(k, inside ? through.gates : math::LstmGates<A>{});
      of_h[k] = inside ? A(0) : d;
      of_c[k] = inside ? through.c_before : of_c[k];
    }
    x.write(gates + gate, H);
    write_units(of_h, dh + at);
    write_units(of_c, dc + at);
  }
};

/// Cell: one of the two above.
template <class T, class Cell>
__global__ void lstm_cell_kernel(std::int64_t units, bool packs, Cell cell) {
  constexpr int N = pack_width<T>;
  visit_grid<N>(
      units, packs, [&](std::int64_t at) { cell.template run<1>(at); },
      [&](std::int64_t at) { cell.template run<N>(at); });
}

}  // namespace cairn::kernels::cuda
