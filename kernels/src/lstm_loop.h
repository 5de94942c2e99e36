// The time loops of lstm and lstm_backward over a backend's cells, and over a product by the
// weight, which does not change from step to step: the CPU packs it once.
#pragma once

#include <functional>

#include "backend.h"

namespace cairn::kernels {

/// y = a W, or y += a W.
using StepProduct = std::function<void(const TensorView& a, const TensorView& y)>;

/// times_weight: y [B, 4 H] = h W^T.
void lstm_loop(const Backend& backend, const StepProduct& times_weight, const TensorView& gates,
               const TensorView& h, const TensorView& c, const LstmOptions& options);

/// add_times_weight: y [B, H] += dgates W.
void lstm_backward_loop(const Backend& backend, const StepProduct& add_times_weight,
                        const TensorView& gates, const TensorView& c, const TensorView& dy,
                        const TensorView& dh, const TensorView& dc, const LstmOptions& options);

}  // namespace cairn::kernels
