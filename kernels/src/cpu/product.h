// A matrix product on oneDNN, by a route.
#pragma once

#include "backend.h"
#include "cpu/matmul_layout.h"
#include "cpu/routes.h"

namespace cairn::kernels {

/// y = alpha a b, then bias and activation, as MatmulOptions says (whose pre_activation does not
/// count here). a and b of one dtype, f16, bf16 or f32, in any layout; leading dimensions merged.
/// By routes that compute in another dtype than a's, a half y is rounded once.
void multiply(const Backend& backend, const MatmulOperands& m, const MatmulOptions& options,
              const Route& route);

}  // namespace cairn::kernels
