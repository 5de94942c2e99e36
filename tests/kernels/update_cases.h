// Parameters of every mix of dtypes for the optimizer updates, and what they should become.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cairn/kernels/optimizer_update.h"
#include "layouts.h"

namespace cairn::test {

using Values = std::vector<double>;

/// Room for a tensor whose first element lies `offset` elements past the start of an allocation;
/// what lies around it must stay as it is.
class Placed {
 public:
  Placed() = default;
  Placed(const Values& values, DType dtype, Device device, std::int64_t offset)
      : offset_(offset), count_(static_cast<std::int64_t>(values.size())) {
    Values all(static_cast<std::size_t>(offset + count_ + kAfter), kAround);
    std::copy(values.begin(), values.end(), all.begin() + offset);
    room_ = Tensor::from(all, {std::ssize(all)}, dtype, device);
  }

  explicit operator bool() const { return static_cast<bool>(room_); }
  TensorView view() const {
    return room_ ? room_.view().slice(0, offset_, offset_ + count_) : TensorView();
  }
  Values values() const { return room_.alias(view()).to_vector<double>(); }
  DType dtype() const { return room_.dtype(); }
  bool surroundings_untouched() const {
    if (!room_) return true;
    Values all = room_.to_vector<double>();
    std::fill_n(all.begin() + offset_, count_, kAround);
    return std::all_of(all.begin(), all.end(), [](double v) { return v == kAround; });
  }

 private:
  static constexpr double kAround = 3.0;
  static constexpr std::int64_t kAfter = 5;
  Tensor room_;
  std::int64_t offset_ = 0, count_ = 0;
};

enum class Master { none, f32, remainder };

/// The value of a bf16 weight and a remainder, by bits.
inline double joined(double weight, double remainder) {
  const auto high = std::bit_cast<std::uint32_t>(static_cast<float>(weight));
  const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder));
  return static_cast<double>(std::bit_cast<float>(high + low));
}

/// A parameter of an update, with its true weight in double precision.
struct Parameter {
  Placed gradient, weight, master, moment1, moment2;
  double gradient_factor = 1.0, l2 = 0.0, norm = 0.0;
  Values w, m, v;  // what they should be
  std::string name;

  Values g(double gradient_scale) const {
    Values all = gradient.values();
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = all[i] * gradient_scale * gradient_factor + l2 * w[i];
    }
    return all;
  }
  kernels::UpdateEntry entry() const {
    return {gradient.view(),
            weight.view(),
            master.view(),
            moment1.view(),
            moment2.view(),
            gradient_factor,
            l2,
            norm};
  }
  Values truth() const {
    if (!master) return weight.values();
    if (master.dtype() == DType::f32) return master.values();
    Values all = weight.values();
    const Values low = master.values();
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = joined(all[i], low[i]);
    return all;
  }
  double precision() const { return epsilon(master ? DType::f32 : weight.dtype()); }

  /// `loss`: how many times the precision a rule may lose.
  void expect_matches(double loss = 8) const {
    expect_close(truth(), w, loss * precision(), 2 * loss * precision(), name + " weight");
    expect_moment(moment1, m, loss);
    expect_moment(moment2, v, loss);
    for (const Placed* p : {&gradient, &weight, &master, &moment1, &moment2}) {
      EXPECT_TRUE(p->surroundings_untouched()) << name;
    }
    if (master && master.dtype() == DType::f32) {
      EXPECT_EQ(weight.values(), rounded(master.values(), weight.dtype())) << name;
    }
  }

 private:
  void expect_moment(const Placed& moment, const Values& expected, double loss) const {
    if (!moment) return;
    const double e = moment.dtype() == DType::bf16 ? epsilon(DType::bf16) : 0.0;
    const double p = precision() == epsilon(DType::f32) ? precision() : 2 * precision();
    expect_close(moment.values(), expected, 1.01 * e + loss * p, loss * p, name + " moment");
  }
};

struct Mix {
  DType gradient, weight, moments;
  Master master;
};

inline std::vector<Mix> all_mixes() {
  std::vector<Mix> all;
  for (DType gradient : {DType::f32, DType::f16, DType::bf16}) {
    for (DType weight : {DType::f32, DType::f16, DType::bf16}) {
      for (DType moments : {DType::f32, DType::bf16}) {
        for (Master master : {Master::none, Master::f32, Master::remainder}) {
          if (master == Master::remainder && weight != DType::bf16) continue;
          all.push_back({gradient, weight, moments, master});
        }
      }
    }
  }
  return all;
}

/// Random values; the five tensors start at five different offsets in [0, 8), which `shift` turns;
/// without a shift all start where allocations do.
inline Parameter make_parameter(const Mix& mix, std::int64_t n, Device device, int moments,
                                std::int64_t shift, std::uint64_t seed = 1) {
  const auto at = [&](std::int64_t k) { return shift == 0 ? 0 : (shift * k + k / 2) % 8; };
  Parameter p;
  p.name = core::str(n, " ", mix.gradient, " ", mix.weight, " ", mix.moments, " master ",
                     static_cast<int>(mix.master), " shift ", shift);
  p.gradient = Placed(random_values(n, seed), mix.gradient, device, at(1));
  const Values truth = rounded(random_values(n, seed + 1), DType::f32);
  Values high = truth, low(truth.size());
  if (mix.master == Master::remainder) {
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(truth[i]));
      const std::uint32_t top = (bits + 0x8000u) & 0xffff0000u;
      high[i] = static_cast<double>(std::bit_cast<float>(top));
      low[i] = static_cast<std::int32_t>(bits - top);
    }
  }
  p.weight = Placed(high, mix.weight, device, at(2));
  if (mix.master == Master::f32) p.master = Placed(truth, DType::f32, device, at(3));
  if (mix.master == Master::remainder) p.master = Placed(low, DType::i16, device, at(3));
  if (moments > 0) p.moment1 = Placed(random_values(n, seed + 2), mix.moments, device, at(4));
  if (moments > 1) p.moment2 = Placed(random_values(n, seed + 3, 0, 1), mix.moments, device, at(5));
  p.w = p.truth();
  if (moments > 0) p.m = p.moment1.values();
  if (moments > 1) p.v = p.moment2.values();
  return p;
}

inline std::vector<kernels::UpdateEntry> entries_of(const std::vector<Parameter>& parameters) {
  std::vector<kernels::UpdateEntry> list;
  for (const Parameter& p : parameters) list.push_back(p.entry());
  return list;
}

}  // namespace cairn::test
