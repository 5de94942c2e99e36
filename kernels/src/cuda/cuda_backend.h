// The CUDA backend. Each file of this folder defines the members of one header (elementwise.cu,
// softmax.cu, ...); cublaslt/ and cudnn/ those that are vendor libraries' work.
#pragma once

#include "backend.h"

namespace cairn::kernels {

class CudaBackend final : public Backend {
 public:
#define CAIRN_OPERATION(name, ...) void name(__VA_ARGS__) const override;
#include "operations.inc"
#undef CAIRN_OPERATION
};

}  // namespace cairn::kernels
