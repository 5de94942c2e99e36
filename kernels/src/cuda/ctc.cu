#include "cuda/ctc.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class A>
CtcOperands<A> operands_of(const TensorView& log_probs, const CtcTargets& t) {
  return {{log_probs.size(0), log_probs.size(1), log_probs.size(2), t.targets.size(1), t.blank},
          log_probs.as<A>(),
          t.targets.as<std::int64_t>(),
          t.input_lengths.as<std::int64_t>(),
          t.target_lengths.as<std::int64_t>()};
}

Grid ctc_grid(const CtcTargets& t) {
  const std::int64_t warps = ceil_div(2 * t.targets.size(1) + 1, 32);
  return {std::min(t.targets.size(0), kMaxBlocks),
          static_cast<int>(32 * std::min<std::int64_t>(warps, 8))};
}

template <class F>
void dispatch_wide(DType dtype, const F& f) {
  dtype == DType::f64 ? f(double{}) : f(float{});
}

}  // namespace

void CudaBackend::ctc_loss(View log_probs, const CtcTargets& targets, View loss, View alpha) const {
  const Queue queue("ctc_loss", loss.device);
  dispatch_wide(loss.dtype, [&](auto type) {
    using A = decltype(type);
    launch(queue, ctc_grid(targets), ctc_loss_kernel<A>, operands_of<A>(log_probs, targets),
           alpha.as<A>(), loss.as<A>());
  });
}

void CudaBackend::ctc_loss_backward(View log_probs, const CtcTargets& targets, View loss,
                                    View alpha, View dloss, View dlog_probs) const {
  const Queue queue("ctc_loss_backward", loss.device);
  fill(dlog_probs, 0.0);
  const std::int64_t states = 2 * targets.targets.size(1) + 1;
  dispatch_wide(loss.dtype, [&](auto type) {
    using A = decltype(type);
    const Buffer<A> beta(queue, 2 * loss.numel() * states);
    launch(queue, ctc_grid(targets), ctc_loss_backward_kernel<A>,
           operands_of<A>(log_probs, targets), alpha.as<A>(), loss.as<A>(), dloss.as<A>(),
           beta.data(), dlog_probs.as<A>());
  });
}

}  // namespace cairn::kernels
