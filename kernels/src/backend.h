// The interface a device backend fills in. Public functions (src/<header>.cpp) validate and
// broadcast, then call backend(device). One op = its declaration here, one place in cpu/, one in
// cuda/, one test.
#pragma once

#include "cairn/kernels/conv.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/embedding.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/norm.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/kernels/pool.h"
#include "cairn/kernels/softmax.h"

namespace cairn::kernels {

/// The operands of multi_tensor_scale (y is empty) and multi_tensor_axpby.
struct LinearLists {
  double a, b;
  std::vector<TensorView> x, y, out;
  bool check_x, check_y;
};

class Backend {
 public:
  using View = const TensorView&;
  virtual ~Backend() = default;

  // elementwise.h; inputs are already expanded to the output's shape
  virtual void fill(View y, double value) const = 0;
  virtual void copy(View x, View y) const = 0;  // within one device
  virtual void binary(BinaryOp op, View a, View b, View y) const = 0;
  virtual void unary(UnaryOp op, View x, View y, double slope) const = 0;
  virtual void unary_backward(UnaryOp op, View saved, View dy, View dx, double slope) const = 0;
  virtual void affine(View x, double scale, double shift, View y) const = 0;
  virtual void pow_scalar(View x, double exponent, View y) const = 0;
  virtual void axpby(double a, View x, double b, View y) const = 0;
  virtual void dropout(View x, double p, std::uint64_t seed, std::uint64_t offset,
                       View y) const = 0;
  virtual void reduce(ReduceOp op, View x, View y, bool accumulate) const = 0;

  // matmul.h
  virtual void matmul(View a, View b, View y, const MatmulOptions& options) const = 0;

  // conv.h
  virtual void conv2d(View x, View weight, View bias, View y,
                      const Conv2dOptions& options) const = 0;
  virtual void conv2d_backward_data(View dy, View weight, View bias, View dx,
                                    const Conv2dOptions& options) const = 0;
  virtual void conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                                      const Conv2dOptions& options, bool accumulate) const = 0;

  // pool.h
  virtual void max_pool2d(View x, View y, View index, const Pool2dOptions& options) const = 0;
  virtual void max_pool2d_backward(View dy, View index, View dx,
                                   const Pool2dOptions& options) const = 0;
  virtual void avg_pool2d(View x, View y, const Pool2dOptions& options) const = 0;
  virtual void avg_pool2d_backward(View dy, View dx, const Pool2dOptions& options) const = 0;

  // norm.h
  virtual void layer_norm(View x, View weight, View bias, double eps, View y, View mean,
                          View rstd) const = 0;
  virtual void layer_norm_backward(View x, View weight, View mean, View rstd, View dy, View dx,
                                   View dweight, View dbias, bool accumulate) const = 0;
  virtual void rms_norm(View x, View weight, double eps, View y, View rstd) const = 0;
  virtual void rms_norm_backward(View x, View weight, View rstd, View dy, View dx, View dweight,
                                 bool accumulate) const = 0;
  virtual void batch_norm(View x, View weight, View bias, View running_mean, View running_var,
                          View y, View mean, View rstd, const BatchNormOptions& options) const = 0;
  virtual void batch_norm_eval(View x, View weight, View bias, View running_mean, View running_var,
                               View y, const BatchNormOptions& options) const = 0;
  virtual void batch_norm_backward(View x, View y, View weight, View mean, View rstd, View dy,
                                   View dx, View dweight, View dbias,
                                   const BatchNormBackwardOptions& options) const = 0;

  // softmax.h, loss.h, embedding.h
  virtual void softmax(View x, View y, const SoftmaxOptions& options) const = 0;
  virtual void softmax_backward(View y, View dy, View dx, const SoftmaxOptions& options) const = 0;
  virtual void cross_entropy(View logits, View target, View loss, View lse,
                             const CrossEntropyOptions& options) const = 0;
  virtual void cross_entropy_backward(View logits, View target, View lse, View dloss, View dlogits,
                                      const CrossEntropyOptions& options) const = 0;
  virtual void mse(View x, View target, View loss) const = 0;
  virtual void mse_backward(View x, View target, View dloss, View dx) const = 0;
  virtual void bce_with_logits(View x, View target, View loss) const = 0;
  virtual void bce_with_logits_backward(View x, View target, View dloss, View dx) const = 0;
  virtual void bce(View p, View target, View loss) const = 0;
  virtual void bce_backward(View p, View target, View dloss, View dp) const = 0;
  virtual void embedding(View weight, View index, View y) const = 0;
  virtual void embedding_backward(View dy, View index, View dweight, bool accumulate) const = 0;

  // multi_tensor.h
  virtual void check_tensors(const std::vector<TensorView>& tensors, double p,
                             TensorCheck* checks) const = 0;  // [tensors], on the device
  /// out = a x + b y, or a x where y is empty; checks what is named (y empty: x).
  virtual void multi_tensor_linear(const LinearLists& lists, TensorCheck* checks) const = 0;
  virtual void update_scale(View scale, View growth_tracker, View hysteresis_tracker,
                            View found_inf, const ScaleUpdateOptions& options) const = 0;
  virtual void hash_tensors(const std::vector<TensorView>& tensors,
                            std::uint64_t* hashes) const = 0;  // [tensors], on the device

  // optimizer_update.h
  virtual void adam_update(const std::vector<UpdateEntry>& entries,
                           const AdamOptions& options) const = 0;
  /// With options.device.
  virtual void adam_device_update(const std::vector<UpdateEntry>& entries,
                                  const AdamOptions& options) const = 0;
  virtual void find_nonfinite(const std::vector<TensorView>& tensors, View found_inf) const = 0;
  virtual void sgd_update(const std::vector<UpdateEntry>& entries,
                          const SgdOptions& options) const = 0;
  virtual void adagrad_update(const std::vector<UpdateEntry>& entries,
                              const AdagradOptions& options) const = 0;
  virtual void novograd_update(const std::vector<UpdateEntry>& entries,
                               const NovoGradOptions& options) const = 0;
  virtual void lamb_update(const std::vector<UpdateEntry>& entries,
                           const LambOptions& options) const = 0;
  virtual void join_master(View weight, View remainder, View out) const = 0;
  virtual void split_master(View in, View weight, View remainder) const = 0;
  virtual void reconcile_master(View weight, View master) const = 0;
};

const Backend& cpu_backend();
const Backend& cuda_backend();  // no_cuda.cpp: throws Unsupported with the remedy

inline const Backend& backend(Device device) {
  return device.is_cuda() ? cuda_backend() : cpu_backend();
}

}  // namespace cairn::kernels
