#include <cairn/core/half.h>

#include "mlp_kernels.cuh"

namespace plain {

template void forward_backward<cairn::core::BFloat16>(const MlpSizes&,
                                                      const MlpArrays<cairn::core::BFloat16>&,
                                                      float, CUstream_st*);

}  // namespace plain
