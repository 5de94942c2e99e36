#include "cuda/cudnn/attention.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <utility>

#include "cuda/bounded_cache.h"
#include "cuda/cudnn/attention_plan.h"
#include "cuda/error.h"

namespace cairn::kernels::cuda {
namespace {

using View = const TensorView&;

constexpr std::size_t kLeastVersion = 91600;
constexpr std::int64_t kMostScoreBytes = std::int64_t{256} << 20;  // of a backward
constexpr std::int64_t kMostSdpaElements = std::numeric_limits<std::int32_t>::max();

/// By CAIRN_ATTENTION.
bool is_wanted(const Queue& queue) {
  const char* const variable = std::getenv("CAIRN_ATTENTION");
  const std::string_view value = variable == nullptr ? "cudnn" : variable;
  CAIRN_CHECK(value == "cudnn" || value == "own", queue.op(),
              "expected CAIRN_ATTENTION to be cudnn or own, got ", value);
  return value == "cudnn";
}

/// The major number of the device's compute capability.
int capability_of(const Queue& queue) {
  static auto& known = *new BoundedCache<int, int>(1024);
  return known.get(queue.device().index, [&] {
    int major = 0;
    check_cuda(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, queue.device().index),
        queue.op(), "cudaDeviceGetAttribute");
    return major;
  });
}

std::int64_t most_columns(int capability, bool backward) {
  return !backward || capability == 9 ? 256 : 128;
}

/// Whether graphs of this form are deterministic there.
bool has_deterministic_backward(int capability) {
  return capability == 8 || capability == 9 || capability == 12;
}

std::int64_t padded_to(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

/// Of one sample's scores, which a backward keeps, with so many rows of zeros.
std::int64_t score_bytes(View q, View k, std::int64_t zeros = 0) {
  return q.size(1) * padded_to(q.size(2) + zeros, 64) * padded_to(k.size(2) + zeros, 128) * 2;
}

/// A dimension of size 1 has any stride, and cuDNN wants one that makes sense.
HeadStrides head_strides_of(View x) {
  if (!x.defined()) return {};
  std::int64_t next = x.size(3);
  const auto stride = [&](int d) {
    const std::int64_t by = x.size(d) == 1 ? next : x.strides[d];
    next = std::max(next, by * x.size(d));
    return by;
  };
  HeadStrides strides;
  strides.row = stride(2), strides.head = stride(1), strides.batch = stride(0);
  return strides;
}

/// cuDNN has no strides of 0, and not too many elements.
bool is_plain(View x) {
  if (!x.defined()) return true;
  const HeadStrides by = head_strides_of(x);
  return std::min({by.batch, by.head, by.row}) > 0 && x.numel() <= kMostSdpaElements;
}

SdpaShape sdpa_shape_of(const Queue& queue, const SdpaOperands& x,
                        const AttentionOptions& options) {
  SdpaShape shape;
  shape.device = queue.device().index;
  shape.backward = x.dq.defined(), shape.causal = options.causal;
  shape.dtype = x.q.dtype;
  shape.batch = x.q.size(0), shape.heads = x.q.size(1), shape.key_heads = x.k.size(1);
  shape.queries = x.q.size(2), shape.keys = x.k.size(2), shape.columns = x.q.size(3);
  shape.q = head_strides_of(x.q), shape.k = head_strides_of(x.k), shape.v = head_strides_of(x.v);
  shape.y = head_strides_of(x.y), shape.dy = head_strides_of(x.dy);
  shape.dq = head_strides_of(x.dq), shape.dk = head_strides_of(x.dk),
  shape.dv = head_strides_of(x.dv);
  return shape;
}

/// The numbers of a graph, in the host's memory while it is queued.
struct SdpaNumbers {
  float scale, hidden = -std::numeric_limits<float>::infinity(), one = 1.0f;
  std::int32_t queries, keys;

  SdpaNumbers(const SdpaShape& shape, const AttentionOptions& options)
      : scale(static_cast<float>(options.scale)),
        queries(static_cast<std::int32_t>(shape.queries)),
        keys(static_cast<std::int32_t>(shape.keys)) {}

  void add_to(std::vector<Argument>& arguments, const SdpaShape& shape) {
    arguments.push_back({kSdpaScale, &scale});
    if (shape.backward) arguments.push_back({kSdpaOne, &one});
    if (!shape.causal) return;
    arguments.push_back({kSdpaHidden, &hidden});
    if (shape.queries == shape.keys) return;
    arguments.push_back({kSdpaQueries, &queries});
    arguments.push_back({kSdpaKeys, &keys});
  }
};

/// With the first plan that runs.
bool run_sdpa(const Queue& queue, const SdpaShape& shape, const AttentionOptions& options,
              std::vector<Argument> arguments) {
  SdpaNumbers numbers(shape, options);
  numbers.add_to(arguments, shape);
  const auto plans = sdpa_plans_for(shape);
  for (std::size_t n = 0;; ++n) {
    const auto plan = plans->at(queue, n);
    if (plan == nullptr) return false;
    if (plan->run(queue, arguments)) return true;  // a proposal is no promise
  }
}

/// Samples [begin, end) of each operand.
SdpaOperands samples_of(const SdpaOperands& x, std::int64_t begin, std::int64_t end) {
  const auto part = [&](View view) { return view.slice(0, begin, end); };
  return {part(x.q),  part(x.k),  part(x.v),  part(x.y), part(x.lse),
          part(x.dy), part(x.dq), part(x.dk), part(x.dv)};
}

bool run_sdpa_backward(const Queue& queue, const SdpaOperands& x, const AttentionOptions& options,
                       float* delta) {
  return run_sdpa(queue, sdpa_shape_of(queue, x, options), options,
                  {{kSdpaQ, x.q.data},
                   {kSdpaK, x.k.data},
                   {kSdpaV, x.v.data},
                   {kSdpaY, x.y.data},
                   {kSdpaLse, x.lse.data},
                   {kSdpaDy, x.dy.data},
                   {kSdpaDq, x.dq.data},
                   {kSdpaDk, x.dk.data},
                   {kSdpaDv, x.dv.data},
                   {kSdpaDelta, delta}});
}

}  // namespace

bool sdpa_may_ask(const Queue& queue, View q, View k, const AttentionOptions& options,
                  bool backward) {
  if (!core::is_half(q.dtype) || options.dropout > 0.0 || options.key_lengths.defined())
    return false;
  if (!(options.scale > 0.0) || (options.causal && q.size(2) > k.size(2))) return false;
  if (!is_wanted(queue) || cudnnGetVersion() < kLeastVersion) return false;
  const int capability = capability_of(queue);
  if (capability < 8 || q.size(3) > most_columns(capability, backward)) return false;
  if (!backward) return true;
  return has_deterministic_backward(capability) && score_bytes(q, k) <= kMostScoreBytes;
}

std::optional<std::int64_t> sdpa_rows_of_zeros(const Queue& queue, View q, View k,
                                               const AttentionOptions& options, bool backward) {
  if (!sdpa_may_ask(queue, q, k, options, backward)) return {};
  const SdpaKind kind{.device = queue.device().index,
                      .backward = backward,
                      .causal = options.causal,
                      .dtype = q.dtype,
                      .heads = q.size(1),
                      .key_heads = k.size(1),
                      .columns = padded_to(q.size(3), 8)};
  const auto zeros = rows_of_zeros(queue, kind, {q.size(2), k.size(2)});
  if (zeros && backward && score_bytes(q, k, *zeros) > kMostScoreBytes) return {};
  return zeros;
}

bool sdpa_forward(const Queue& queue, const SdpaOperands& x, const AttentionOptions& options) {
  for (View view : {x.q, x.k, x.v, x.y}) {
    if (!is_plain(view)) return false;
  }
  return run_sdpa(queue, sdpa_shape_of(queue, x, options), options,
                  {{kSdpaQ, x.q.data},
                   {kSdpaK, x.k.data},
                   {kSdpaV, x.v.data},
                   {kSdpaY, x.y.data},
                   {kSdpaLse, x.lse.data}});
}

bool sdpa_backward(const Queue& queue, const SdpaOperands& x, const AttentionOptions& options) {
  for (View view : {x.q, x.k, x.v, x.y, x.dy, x.dq, x.dk, x.dv}) {
    if (!is_plain(view)) return false;
  }
  // So many samples at a time that their scores stay within the limit.
  const std::int64_t batch = x.q.size(0), fit = kMostScoreBytes / score_bytes(x.q, x.k);
  const std::int64_t parts = (batch + fit - 1) / fit, step = (batch + parts - 1) / parts;
  const Buffer<float> delta(queue, step * x.q.size(1) * x.q.size(2));
  for (std::int64_t begin = 0; begin < batch; begin += step) {
    const SdpaOperands part = samples_of(x, begin, std::min(batch, begin + step));
    if (!run_sdpa_backward(queue, part, options, delta.data())) return false;
  }
  return true;
}

}  // namespace cairn::kernels::cuda
