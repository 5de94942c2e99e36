#include "gpu/sim/nccl_math.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cairn::gpusim {
namespace {

constexpr std::size_t kAlignment = 16;  // bytes, of a ring's chunks

/// Half types compute in f32 and round, which for one operation is the same as computing exactly.
template <class T>
using Wide =
    std::conditional_t<std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, float, T>;

template <class T>
Wide<T> widen(T x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else {
    return x;
  }
}

template <class T>
T narrow(Wide<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <class W>
W add(W a, W b) {
  if constexpr (std::is_integral_v<W>) {  // wraps around
    return static_cast<W>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class W>
W multiply(W a, W b) {
  if constexpr (std::is_integral_v<W>) {
    return static_cast<W>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}

/// Of floating types the number where one is NaN, as CUDA's fmin and fmax.
template <class W>
W extreme(W a, W b, bool smaller) {
  if constexpr (std::is_floating_point_v<W>) {
    return smaller ? std::fmin(a, b) : std::fmax(a, b);
  } else {
    return smaller ? std::min(a, b) : std::max(a, b);
  }
}

template <class W>
W combine(W a, W b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return multiply(a, b);
    case ncclMin:
      return extreme(a, b, true);
    case ncclMax:
      return extreme(a, b, false);
    default:
      return add(a, b);
  }
}

template <class T>
T at(const void* data, std::size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + i * sizeof x, sizeof x);
  return x;
}

template <class T>
T reduce_one(const std::vector<const void*>& inputs, std::size_t i, int first, ncclRedOp_t op) {
  const int n = static_cast<int>(inputs.size());
  const bool average = op == ncclAvg, floating = std::is_floating_point_v<Wide<T>>;
  const T factor = narrow<T>(static_cast<Wide<T>>(1.0 / n));
  const auto input = [&](int rank) {
    const T x = at<T>(inputs[static_cast<std::size_t>(rank % n)], i);
    return average && floating ? narrow<T>(widen(x) * widen(factor)) : x;
  };
  T sum = input(first);
  for (int hop = 1; hop < n; ++hop) {
    sum = narrow<T>(combine(widen(sum), widen(input(first + hop)), op));
  }
  return average && !floating ? narrow<T>(widen(sum) / static_cast<Wide<T>>(n)) : sum;
}

template <class T>
void reduce(const std::vector<const void*>& inputs, void* out, std::size_t begin, std::size_t end,
            int first, ncclRedOp_t op) {
  for (std::size_t i = begin; i < end; ++i) {
    const T x = reduce_one<T>(inputs, i, first, op);
    std::memcpy(static_cast<char*>(out) + i * sizeof x, &x, sizeof x);
  }
}

struct Type {
  const char* name;
  std::size_t size;
  decltype(&reduce<float>) reduce;
};

Type type_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return {"i8", 1, reduce<std::int8_t>};
    case ncclUint8:
      return {"u8", 1, reduce<std::uint8_t>};
    case ncclInt32:
      return {"i32", 4, reduce<std::int32_t>};
    case ncclUint32:
      return {"u32", 4, reduce<std::uint32_t>};
    case ncclInt64:
      return {"i64", 8, reduce<std::int64_t>};
    case ncclUint64:
      return {"u64", 8, reduce<std::uint64_t>};
    case ncclFloat16:
      return {"f16", 2, reduce<__half>};
    case ncclBfloat16:
      return {"bf16", 2, reduce<__nv_bfloat16>};
    case ncclFloat32:
      return {"f32", 4, reduce<float>};
    case ncclFloat64:
      return {"f64", 8, reduce<double>};
    default:
      return {"unknown", 0, nullptr};
  }
}

}  // namespace

std::size_t nccl_size(ncclDataType_t type) {
  return type_of(type).size;
}

std::string nccl_name(ncclDataType_t type) {
  return type_of(type).name;
}

std::string nccl_name(ncclRedOp_t op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg"};
  return op >= 0 && op < ncclNumOps ? kNames[op] : "unknown";
}

void nccl_combine(const std::vector<const void*>& inputs, void* out, std::size_t begin,
                  std::size_t end, int first, ncclDataType_t type, ncclRedOp_t op) {
  type_of(type).reduce(inputs, out, begin, end, first, op);
}

void nccl_ring(const std::vector<const void*>& inputs, void* out, std::size_t count,
               ncclDataType_t type, ncclRedOp_t op) {
  const std::size_t n = inputs.size(), step = kAlignment / nccl_size(type);
  const std::size_t chunk = ((count + n - 1) / n + step - 1) / step * step;
  for (std::size_t c = 0; c < n; ++c) {
    const std::size_t begin = std::min(count, c * chunk), end = std::min(count, begin + chunk);
    nccl_combine(inputs, out, begin, end, static_cast<int>(c) + 1, type, op);
  }
}

}  // namespace cairn::gpusim
