#include "cpu/loop.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"

namespace cairn::kernels::cpu {

namespace {

constexpr int kMaxOperands = 6;
constexpr std::int64_t kBlock = 512;   // elements of a gathered run
constexpr std::int64_t kLongRow = 64;  // from here on, runs end with the innermost dimension

/// A position in a row-major walk.
class Walk {
 public:
  Walk(const Shape& shape, std::int64_t first)
      : shape_(shape), index_(Shape::filled(shape.dims(), 0)) {
    for (int d = shape.dims() - 1; d >= 0; --d) {
      index_[d] = first % shape[d];
      first /= shape[d];
    }
  }
  std::int64_t left_in_row() const { return shape_.back() - index_.back(); }
  std::int64_t offset(const Strides& strides) const {
    std::int64_t at = 0;
    for (int d = 0; d < shape_.dims(); ++d) at += index_[d] * strides[d];
    return at;
  }
  /// Not past the end of a row.
  void advance(std::int64_t n) {
    int d = shape_.dims() - 1;
    index_[d] += n;
    while (d > 0 && index_[d] == shape_[d]) {
      index_[d] = 0;
      ++index_[--d];
    }
  }

 private:
  const Shape& shape_;
  Shape index_;
};

template <class T>
void gather_row(const char* from, std::int64_t stride, std::int64_t n, char* to) {
  const T* x = reinterpret_cast<const T*>(from);
  T* y = reinterpret_cast<T*>(to);
  if (stride == 0) {
    std::fill(y, y + n, *x);
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i] = x[i * stride];
  }
}

template <class T>
void scatter_row(const char* from, std::int64_t stride, std::int64_t n, char* to) {
  const T* x = reinterpret_cast<const T*>(from);
  T* y = reinterpret_cast<T*>(to);
  for (std::int64_t i = 0; i < n; ++i) y[i * stride] = x[i];
}

template <class F>
void dispatch_element(std::size_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    case 8:
      return f(std::uint64_t{});
  }
  core::fail("loop", "expected elements of 1, 2, 4 or 8 bytes, got ", bytes);
}

/// Calls row(offset of the view, offset of the run, elements) for each piece of a row in [first,
/// first + n); offsets in elements.
template <class Row>
void for_each_row(const StridedRun& view, std::int64_t first, std::int64_t n, const Row& row) {
  Walk walk(view.shape, first);
  for (std::int64_t done = 0; done < n;) {
    const std::int64_t piece = std::min(n - done, walk.left_in_row());
    row(walk.offset(view.strides), done, piece);
    walk.advance(piece);
    done += piece;
  }
}

/// One operand inside a loop.
struct Arm {
  StridedRun run;
  bool written;
  bool flat;  // the loop's order is its memory order, without gaps

  char* at(std::int64_t element) const {
    return const_cast<char*>(run.data) + element * static_cast<std::int64_t>(run.element);
  }
};

/// Runs one chunk in blocks, through buffers where an operand needs them.
class BlockRunner {
 public:
  BlockRunner(const std::vector<Arm>& arms, const Shape& shape, const RunKernel& kernel)
      : arms_(arms), shape_(shape), kernel_(kernel), clip_(shape.back() >= kLongRow) {}

  void run(std::int64_t begin, std::int64_t end) {
    Walk walk(shape_, begin);
    for (std::int64_t at = begin; at < end;) {
      std::int64_t n = std::min(kBlock, end - at);
      if (clip_) n = std::min(n, walk.left_in_row());
      block(walk, at, n);
      at += n;
      if (clip_) walk.advance(n);
    }
  }

 private:
  void block(const Walk& walk, std::int64_t at, std::int64_t n) {
    std::array<void*, kMaxOperands> data{};
    std::array<bool, kMaxOperands> buffered{};
    for (std::size_t k = 0; k < arms_.size(); ++k) {
      const Arm& arm = arms_[k];
      if (arm.flat) {
        data[k] = arm.at(at);
      } else if (clip_ && arm.run.strides.back() == 1) {
        data[k] = arm.at(walk.offset(arm.run.strides));
      } else {
        data[k] = buffers_[k].data();
        buffered[k] = true;
        if (!arm.written) gather(arm.run, at, n, data[k]);
      }
    }
    kernel_(data.data(), n, at);
    for (std::size_t k = 0; k < arms_.size(); ++k) {
      if (buffered[k] && arms_[k].written) scatter(data[k], at, n, arms_[k].run);
    }
  }

  const std::vector<Arm>& arms_;
  const Shape& shape_;
  const RunKernel& kernel_;
  bool clip_;
  alignas(64) std::array<std::array<char, kBlock * 8>, kMaxOperands> buffers_;
};

std::vector<int> dims_by_stride(const TensorView& view, Order order) {
  std::vector<int> dims;
  for (int d = 0; d < view.dims(); ++d) {
    if (view.shape[d] != 1) dims.push_back(d);
  }
  if (order == Order::memory) {
    std::stable_sort(dims.begin(), dims.end(),
                     [&](int a, int b) { return view.strides[a] > view.strides[b]; });
  }
  return dims;
}

}  // namespace

void gather(const StridedRun& from, std::int64_t first, std::int64_t n, void* to) {
  const auto bytes = static_cast<std::int64_t>(from.element);
  dispatch_element(from.element, [&](auto zero) {
    for_each_row(from, first, n, [&](std::int64_t offset, std::int64_t done, std::int64_t piece) {
      gather_row<decltype(zero)>(from.data + offset * bytes, from.strides.back(), piece,
                                 static_cast<char*>(to) + done * bytes);
    });
  });
}

void scatter(const void* from, std::int64_t first, std::int64_t n, const StridedRun& to) {
  const auto bytes = static_cast<std::int64_t>(to.element);
  dispatch_element(to.element, [&](auto zero) {
    for_each_row(to, first, n, [&](std::int64_t offset, std::int64_t done, std::int64_t piece) {
      scatter_row<decltype(zero)>(static_cast<const char*>(from) + done * bytes, to.strides.back(),
                                  piece, const_cast<char*>(to.data) + offset * bytes);
    });
  });
}

MergedDims merge_dims(std::span<const TensorView* const> views, Order order) {
  const TensorView& last = *views.back();
  MergedDims merged;
  merged.strides.resize(views.size());
  for (int d : dims_by_stride(last, order)) {
    const int tail = merged.shape.dims() - 1;
    bool joins = tail >= 0;
    for (std::size_t k = 0; joins && k < views.size(); ++k) {
      joins = merged.strides[k][tail] == views[k]->strides[d] * views[k]->shape[d];
    }
    if (joins) {
      merged.shape[tail] *= last.shape[d];
    } else {
      merged.shape.push_back(last.shape[d]);
    }
    for (std::size_t k = 0; k < views.size(); ++k) {
      const std::int64_t stride = views[k]->strides[d];
      if (joins) {
        merged.strides[k][tail] = stride;
      } else {
        merged.strides[k].push_back(stride);
      }
    }
  }
  if (merged.shape.empty()) {
    merged.shape.push_back(1);
    for (Strides& strides : merged.strides) strides.push_back(1);
  }
  return merged;
}

void for_each_run(std::initializer_list<Operand> operands, const RunKernel& kernel, Order order) {
  const TensorView& last = (operands.end() - 1)->view;
  const std::int64_t n = last.numel();
  if (n == 0) return;

  std::array<const TensorView*, kMaxOperands> views{};
  std::size_t count = 0;
  for (const Operand& operand : operands) views[count++] = &operand.view;
  const MergedDims dims = merge_dims({views.data(), count}, order);

  std::vector<Arm> arms;
  const Strides dense = core::contiguous_strides(dims.shape);
  for (std::size_t k = 0; k < count; ++k) {
    const TensorView& view = *views[k];
    const StridedRun run{view.as<char>(), dims.shape, dims.strides[k], core::size_of(view.dtype)};
    arms.push_back({run, (operands.begin() + k)->written, dims.strides[k] == dense});
  }
  const bool all_flat =
      std::all_of(arms.begin(), arms.end(), [](const Arm& arm) { return arm.flat; });
  core::parallel_for(n, kGrain, [&](std::int64_t begin, std::int64_t end) {
    if (!all_flat) {
      BlockRunner(arms, dims.shape, kernel).run(begin, end);
      return;
    }
    std::array<void*, kMaxOperands> data{};
    for (std::size_t k = 0; k < arms.size(); ++k) data[k] = arms[k].at(begin);
    kernel(data.data(), end - begin, begin);
  });
}

}  // namespace cairn::kernels::cpu
