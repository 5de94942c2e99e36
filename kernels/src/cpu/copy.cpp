// fill and copy (with conversion) within the host's memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/copy.cpp"
#include "cpu/targets.h"
// ---
#include <algorithm>
#include <array>
#include <cstring>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/copy.h"
#include "cpu/cpu_backend.h"
#include "cpu/loop.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

template <class T, class U>
void convert_floats(const T* x, U* y, std::int64_t n) {
  for_vectors<Compute2<T, U>>(
      n, [&](auto io, std::int64_t i) HWY_ATTR { io.store(io.load(x + i), y + i); });
}

void ConvertFloats(DType from, DType to, const void* x, void* y, std::int64_t n) {
  core::dispatch_floating(from, "copy", [&](auto a) {
    core::dispatch_floating(to, "copy", [&](auto b) {
      convert_floats(static_cast<const decltype(a)*>(x), static_cast<decltype(b)*>(y), n);
    });
  });
}

// In whole lines of the caches: a line that is filled in part goes to the memory in pieces.
void CopyPastCaches(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  constexpr std::size_t kLine = 64;
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = std::min(bytes, past == 0 ? 0 : kLine - past);
  std::memcpy(to, from, head);
  std::size_t at = head;
  if (kLine % hn::Lanes(d) == 0 && hn::Lanes(d) > 1) {
    for (; at + kLine <= bytes; at += kLine) {
      for (std::size_t i = 0; i < kLine; i += hn::Lanes(d)) {
        hn::Stream(hn::LoadU(d, from + at + i), d, to + at + i);
      }
    }
    hwy::FlushStream();
  }
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(ConvertFloats);
HWY_EXPORT(CopyPastCaches);

namespace {

template <class U, class T>
U convert(T x) {
  constexpr bool from_half = std::is_same_v<T, core::Half> || std::is_same_v<T, core::BFloat16>;
  constexpr bool to_half = std::is_same_v<U, core::Half> || std::is_same_v<U, core::BFloat16>;
  if constexpr (from_half) {
    return convert<U>(static_cast<float>(x));
  } else if constexpr (to_half) {
    return U(static_cast<float>(x));
  } else if constexpr (std::is_same_v<U, bool>) {
    return x != T{};
  } else {
    return static_cast<U>(x);
  }
}

template <class T, class U>
void convert_run(const T* x, U* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = convert<U>(x[i]);
}

void convert_block(DType from, DType to, const void* x, void* y, std::int64_t n) {
  if (from == to) {
    std::memcpy(y, x, static_cast<std::size_t>(n) * core::size_of(from));
  } else if (core::is_floating(from) && core::is_floating(to)) {
    HWY_DYNAMIC_DISPATCH(ConvertFloats)(from, to, x, y, n);
  } else {
    core::dispatch_all(from, [&](auto a) {
      core::dispatch_all(to, [&](auto b) {
        convert_run(static_cast<const decltype(a)*>(x), static_cast<decltype(b)*>(y), n);
      });
    });
  }
}

constexpr std::int64_t kTile = 64;

/// Copies a transposed view tile by tile, so that whole cache lines are used on both sides.
class TransposedCopy {
 public:
  TransposedCopy(const TensorView& x, const TensorView& y) : x_(x), y_(y) {
    const std::array<const TensorView*, 2> views{&x, &y};
    dims_ = cpu::merge_dims(views, cpu::Order::memory);
    inner_ = dims_.shape.dims() - 1;
    for (int d = 0; d < inner_; ++d) {
      if (x_stride(d) == 1) across_ = d;
    }
  }

  /// Whether the innermost dimension of y is strided in x, whose own innermost one is another, and
  /// both are long enough.
  bool pays() const {
    return across_ >= 0 && y_stride(inner_) == 1 && x_stride(inner_) > 1 &&
           dims_.shape[inner_] >= 8 && dims_.shape[across_] >= 8;
  }

  void run() const {
    const std::int64_t tiles_across = (dims_.shape[across_] - 1) / kTile + 1;
    const std::int64_t tiles_inner = (dims_.shape[inner_] - 1) / kTile + 1;
    const std::int64_t tiles = tiles_across * tiles_inner;
    std::int64_t outer = 1;
    for (int d = 0; d < inner_; ++d) outer *= d == across_ ? 1 : dims_.shape[d];
    core::parallel_for(outer * tiles, 8, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) {
        tile(k / tiles, k % tiles / tiles_inner * kTile, k % tiles_inner * kTile);
      }
    });
  }

 private:
  std::int64_t x_stride(int d) const { return dims_.strides[0][d]; }
  std::int64_t y_stride(int d) const { return dims_.strides[1][d]; }

  void tile(std::int64_t outer, std::int64_t across, std::int64_t inner) const {
    std::int64_t from = across + inner * x_stride(inner_), to = across * y_stride(across_) + inner;
    for (int d = inner_ - 1; d >= 0; --d) {
      if (d == across_) continue;
      from += outer % dims_.shape[d] * x_stride(d);
      to += outer % dims_.shape[d] * y_stride(d);
      outer /= dims_.shape[d];
    }
    const std::int64_t height = std::min(kTile, dims_.shape[across_] - across);
    const std::int64_t width = std::min(kTile, dims_.shape[inner_] - inner);
    switch (core::size_of(x_.dtype)) {
      case 1:
        return transpose<std::uint8_t>(from, to, height, width);
      case 2:
        return transpose<std::uint16_t>(from, to, height, width);
      case 4:
        return transpose<std::uint32_t>(from, to, height, width);
      default:
        return transpose<std::uint64_t>(from, to, height, width);
    }
  }

  template <class Element>
  void transpose(std::int64_t from, std::int64_t to, std::int64_t height,
                 std::int64_t width) const {
    alignas(64) std::array<Element, kTile * kTile> buffer;
    const Element* x = static_cast<const Element*>(x_.data) + from;
    for (std::int64_t j = 0; j < width; ++j) {
      for (std::int64_t i = 0; i < height; ++i) {
        buffer[static_cast<std::size_t>(i * kTile + j)] = x[j * x_stride(inner_) + i];
      }
    }
    const auto bytes = static_cast<std::int64_t>(core::size_of(y_.dtype));
    for (std::int64_t i = 0; i < height; ++i) {
      convert_block(x_.dtype, y_.dtype, buffer.data() + i * kTile,
                    y_.as<char>() + (to + i * y_stride(across_)) * bytes, width);
    }
  }

  const TensorView& x_;
  const TensorView& y_;
  cpu::MergedDims dims_;
  int inner_ = 0;
  int across_ = -1;
};

}  // namespace

void copy_past_caches(const void* from, void* to, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(CopyPastCaches)
  (static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), bytes);
}

void CpuBackend::fill(View y, double value) const {
  core::dispatch_all(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T element = convert<T>(value);
    cpu::for_each_run({cpu::out(y)}, [&](void* const* data, std::int64_t n, std::int64_t) {
      std::fill_n(static_cast<T*>(data[0]), n, element);
    });
  });
}

void CpuBackend::copy(View x, View y) const {
  if (x.data == y.data && x.dtype == y.dtype && x.strides == y.strides) return;
  if (y.numel() == 0) return;
  const TransposedCopy transposed(x, y);
  if (transposed.pays()) return transposed.run();
  cpu::for_each_run({cpu::in(x), cpu::out(y)},
                    [&](void* const* data, std::int64_t n, std::int64_t) {
                      convert_block(x.dtype, y.dtype, data[0], data[1], n);
                    });
}

}  // namespace cairn::kernels
#endif
