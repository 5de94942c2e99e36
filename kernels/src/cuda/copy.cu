#include "cuda/copy.cuh"

#include <algorithm>
#include <bit>
#include <optional>

#include "cuda/cuda_backend.h"
#include "cuda/map.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class F>
void dispatch_word(DType dtype, F f) {
  switch (core::size_of(dtype)) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

/// The bits of a value in a dtype, in the low bytes.
std::uint64_t bits_of(double value, DType dtype) {
  const auto integer = [&] { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); };
  switch (dtype) {
    case DType::f16:
      return core::Half(static_cast<float>(value)).bits;
    case DType::bf16:
      return core::BFloat16(static_cast<float>(value)).bits;
    case DType::f32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(value));
    case DType::f64:
      return std::bit_cast<std::uint64_t>(value);
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
      return integer();
    case DType::boolean:
      return value != 0.0;
  }
  return 0;
}

void convert_any(const Queue& queue, const TensorView& x, const TensorView& y) {
  const core::Strides* const strides[] = {&y.strides, &x.strides};
  const auto layout = make_layout(y.shape, strides, Visit::any_order);
  const std::int64_t n = y.numel();
  if (n == 0) return;
  launch(queue, grid_for(n), convert_any_kernel, n, layout, x.data, x.dtype, y.data, y.dtype);
}

/// Long rows that no packs fit, if the copy is one of such.
template <class Word>
std::optional<RowCopy> rows_without_packs(Layout<2> layout, const TensorView& x,
                                          const TensorView& y) {
  const bool rows = layout.dims == 2 && layout.stride[0][0] == 1 && layout.stride[1][0] == 1;
  if (!rows || layout.size[0] < kThreads) return {};
  const RowCopy copy{layout.size[1], layout.size[0], layout.stride[1][1], layout.stride[0][1]};
  constexpr int N = pack_width<Word, Word>;
  if (packs_aligned(x.as<const Word>(), y.as<Word>()) && take_packs<N>(layout)) return {};
  return copy;
}

void copy_words(const Queue& queue, const TensorView& x, const TensorView& y) {
  const core::Strides* const strides[] = {&y.strides, &x.strides};
  const Layout<2> layout = make_layout(y.shape, strides, Visit::any_order);
  if (layout.is_linear()) {
    queue.copy(y.data, x.data, y.nbytes());
    return;
  }
  dispatch_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    if (const auto rows = rows_without_packs<Word>(layout, x, y)) {
      const std::int64_t pieces = rows->rows * ceil_div(rows->columns, kThreads * kCopiesAhead);
      launch(queue, {std::min(pieces, kMaxBlocks), kThreads}, copy_rows_kernel<Word>, *rows,
             x.as<const Word>(), y.as<Word>());
    } else {
      map<Word, Word>(queue, Same<Word>{}, y, {&x});
    }
  });
}

}  // namespace

void CudaBackend::fill(View y, double value) const {
  const Queue queue("fill", y.device);
  dispatch_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word>(queue, Constant<Word>{static_cast<Word>(bits_of(value, y.dtype))}, y, {});
  });
}

void CudaBackend::copy(View x, View y) const {
  if (x.data == y.data && x.dtype == y.dtype && x.strides == y.strides) return;
  const Queue queue("copy", y.device);
  if (x.dtype == y.dtype) {
    copy_words(queue, x, y);
    return;
  }
  if (!core::is_floating(x.dtype) || !core::is_floating(y.dtype)) {
    convert_any(queue, x, y);
    return;
  }
  core::dispatch_floating(x.dtype, "copy", [&](auto from) {
    core::dispatch_floating(y.dtype, "copy", [&](auto to) {
      using X = decltype(from);
      using Y = decltype(to);
      if constexpr (!std::is_same_v<X, Y>) map<Y, X>(queue, Convert<X, Y>{}, y, {&x});
    });
  });
}

}  // namespace cairn::kernels
