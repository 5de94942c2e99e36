// Share of rows whose argmax is the label.
#pragma once

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"

namespace support {

/// logits [N, C], labels [N].
inline double accuracy(const cairn::Tensor& logits, const cairn::Tensor& labels) {
  using namespace cairn;
  const autograd::NoGradGuard no_grad;
  const Tensor right = autograd::compare(kernels::BinaryOp::eq, autograd::argmax(logits), labels);
  return autograd::mean(autograd::to(right, DType::f32)).item();
}

}  // namespace support
