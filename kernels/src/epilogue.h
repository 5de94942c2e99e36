// The activation of an epilogue as a kernel of its own.
#pragma once

#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/matmul.h"

namespace cairn::kernels {

inline UnaryOp unary_of(Epilogue epilogue) {  // not of Epilogue::none
  switch (epilogue) {
    case Epilogue::none:
    case Epilogue::relu:
      break;
    case Epilogue::gelu_tanh:
      return UnaryOp::gelu_tanh;
    case Epilogue::gelu:
      return UnaryOp::gelu;
  }
  return UnaryOp::relu;
}

}  // namespace cairn::kernels
