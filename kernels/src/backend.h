// The interface a device backend fills in. Public functions (src/<header>.cpp) validate and
// broadcast, then call backend(device). The operations are listed once, in operations.inc.
#pragma once

#include "cairn/kernels/attention.h"
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/conv.h"
#include "cairn/kernels/ctc.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/embedding.h"
#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/lstm.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/kernels/pool.h"
#include "cairn/kernels/resample.h"
#include "cairn/kernels/softmax.h"
#include "cairn/kernels/sort_scan.h"
#include "cairn/kernels/update_scale.h"
#include "update_list.h"

namespace cairn::kernels {

/// out = a x + b y, or a x where y is empty; with checks of what is named.
struct LinearLists {
  double a, b;
  std::vector<TensorView> x, y, out;
  bool check_x, check_y;
};

class Backend {
 public:
  using View = const TensorView&;
  virtual ~Backend() = default;

#define CAIRN_OPERATION(name, ...) virtual void name(__VA_ARGS__) const = 0;
#include "operations.inc"
#undef CAIRN_OPERATION
};

const Backend& cpu_backend();
const Backend& cuda_backend();  // no_cuda.cpp: throws Unsupported with the remedy

inline const Backend& backend(Device device) {
  return device.is_cuda() ? cuda_backend() : cpu_backend();
}

}  // namespace cairn::kernels
