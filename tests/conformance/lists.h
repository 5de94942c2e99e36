// The lists of the multi-tensor tests: [a, b, a, b, ...], `repeat` times, of constant values.
//
// Apex ran each configuration with three chunk sizes, which decided how a list was cut over thread
// blocks and whether its chunks began aligned. Cairn cuts lists by itself (65536 elements on the
// CPU, 16384 on CUDA); what is left of that axis to a caller is where tensors begin: at a multiple
// of 8 elements, or 1 or 5 behind it (kOffsets).
#pragma once

#include <array>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "support/tensors.h"

namespace cairn::conformance {

using Pair = std::array<Shape, 2>;

inline constexpr std::int64_t kOffsets[] = {0, 1, 5};
inline constexpr int kRepeats[] = {1, 55};
inline constexpr DType kTypes[] = {DType::f32, DType::f16};

inline const Pair kFlatPairs[] = {{Shape{7777 * 77}, Shape{555 * 555}}, {Shape{777}, Shape{555}},
                                  {Shape{555}, Shape{65537}},           {Shape{65537}, Shape{555}},
                                  {Shape{555}, Shape{65536}},           {Shape{65536}, Shape{555}},
                                  {Shape{33333}, Shape{555}},           {Shape{555}, Shape{33333}}};

/// N C H W, stored channels-last.
inline const Pair kImagePairs[] = {
    {Shape{7, 77, 7, 77}, Shape{5, 55, 5, 55}},    {Shape{1, 1, 777, 1}, Shape{1, 1, 555, 1}},
    {Shape{5, 47, 5, 55}, Shape{1, 1, 1, 65537}},  {Shape{1, 1, 1, 65537}, Shape{55, 47, 5, 55}},
    {Shape{555, 1, 1, 1}, Shape{32, 8, 32, 8}},    {Shape{32, 8, 32, 8}, Shape{55, 47, 5, 55}},
    {Shape{1, 1, 33333, 1}, Shape{55, 47, 55, 5}}, {Shape{55, 47, 55, 5}, Shape{1, 1, 33333, 1}}};

/// One of the pairs on one device.
struct PairCase {
  Device device;
  Pair pair;
};

inline std::vector<PairCase> cases(const Pair* first, const Pair* last) {
  std::vector<PairCase> all;
  for (Device device : test::fast_devices()) {
    for (const Pair* pair = first; pair != last; ++pair) all.push_back({device, *pair});
  }
  return all;
}

/// "cpu_777_and_1x1x777x1"
inline std::string case_name(const testing::TestParamInfo<PairCase>& info) {
  std::ostringstream name;
  name << (info.param.device.is_cuda() ? "cuda" : "cpu");
  const char* separator = "_";
  for (const Shape& shape : info.param.pair) {
    for (std::int64_t size : shape) {
      name << separator << size;
      separator = "x";
    }
    separator = "_and_";
  }
  return name.str();
}

class List {
 public:
  /// Lists of the same name and dtype share their memory, so that 55 repetitions of large tensors
  /// are allocated once, not in every configuration.
  List(const char* name, const PairCase& c, int repeat, DType dtype, std::int64_t offset) {
    std::vector<std::int64_t> starts;
    std::int64_t end = 0;
    for (int i = 0; i < 2 * repeat; ++i) {
      starts.push_back(end + offset);
      end += (c.pair[static_cast<std::size_t>(i % 2)].numel() + offset + 7) / 8 * 8;
    }
    const TensorView all = memory(name, dtype, c.device, end).view();
    whole_ = all.slice(0, 0, end);
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const Shape& shape = c.pair[i % 2];
      views_.push_back(all.slice(0, starts[i], starts[i] + shape.numel()));
      if (shape.dims() == 4) {
        views_.back().shape = shape;
        views_.back().strides = core::channels_last_strides(shape);
      }
    }
  }

  const std::vector<TensorView>& views() const { return views_; }
  void fill(double value) const { kernels::fill(whole_, value); }
  /// Element `at`, in memory order, of tensor i.
  void set(std::size_t i, std::int64_t at, double value) const {
    const TensorView flat(views_[i].data, {views_[i].numel()}, views_[i].dtype, views_[i].device);
    kernels::fill(flat.slice(0, at, at + 1), value);
  }
  /// Elements of all views that are not within rtol = 1e-5, atol = 1e-8 (torch.allclose) of value.
  std::int64_t count_not_close(double value) const {
    std::int64_t count = 0;
    for (const TensorView& view : views_) {
      const TensorView flat(view.data, {view.numel()}, view.dtype, view.device);
      if (view.device.is_cpu()) {
        count += count_on_host(flat, value);
      } else {
        const Tensor host = Tensor::empty(flat.shape, flat.dtype);
        core::copy_bytes(flat, host);
        core::Stream::current(view.device).synchronize();
        count += count_on_host(host, value);
      }
    }
    return count;
  }

 private:
  static const Tensor& memory(const char* name, DType dtype, Device device, std::int64_t count) {
    static std::map<std::tuple<std::string, DType, std::string>, Tensor> kept;
    Tensor& tensor = kept[{name, dtype, core::to_string(device)}];
    if (!tensor || tensor.numel() < count) {
      tensor = Tensor();
      tensor = Tensor::empty({count}, dtype, device);
    }
    return tensor;
  }

  static std::int64_t count_on_host(const TensorView& x, double value) {
    constexpr std::int64_t kGrain = 1 << 16;
    const std::int64_t n = x.numel();
    std::vector<std::int64_t> counts(static_cast<std::size_t>((n + kGrain - 1) / kGrain));
    core::parallel_for(n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      counts[static_cast<std::size_t>(begin / kGrain)] =
          x.dtype == DType::f32 ? floats_not_close(x.as<float>() + begin, end - begin, value)
                                : halves_unequal(x.as<core::Half>() + begin, end - begin, value);
    });
    std::int64_t count = 0;
    for (std::int64_t c : counts) count += c;
    return count;
  }
  static std::int64_t floats_not_close(const float* x, std::int64_t n, double value) {
    const auto expected = static_cast<float>(value);
    const auto most = static_cast<float>(1e-8 + 1e-5 * std::abs(value));
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) count += !(std::abs(x[i] - expected) <= most);
    return count;
  }
  /// Neighbouring halves are further apart than the tolerance.
  static std::int64_t halves_unequal(const core::Half* x, std::int64_t n, double value) {
    const core::Half expected(static_cast<float>(value));
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) count += x[i].bits != expected.bits;
    return count;
  }

  TensorView whole_;
  std::vector<TensorView> views_;
};

/// Whether a check found an element that is inf or NaN: Apex's flag.
inline bool flag_of(const std::vector<kernels::TensorCheck>& checks) {
  for (const kernels::TensorCheck& check : checks) {
    if (check.nonfinite > 0) return true;
  }
  return false;
}

}  // namespace cairn::conformance
