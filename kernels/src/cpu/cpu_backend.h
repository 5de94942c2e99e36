// The CPU backend. Each file of this folder defines the members of one header (matmul.cpp,
// softmax.cpp, ...).
#pragma once

#include "backend.h"

namespace cairn::kernels {

class CpuBackend final : public Backend {
 public:
#define CAIRN_OPERATION(name, ...) void name(__VA_ARGS__) const override;
#include "operations.inc"
#undef CAIRN_OPERATION
};

}  // namespace cairn::kernels
