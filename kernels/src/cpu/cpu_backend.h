// The CPU backend. Each file of this folder defines the members of one header (elementwise.cpp,
// matmul.cpp, ...).
#pragma once

#include "backend.h"

namespace cairn::kernels {

class CpuBackend final : public Backend {
 public:
  // elementwise.h; inputs are already expanded to the output's shape
  void fill(View y, double value) const override;
  void copy(View x, View y) const override;  // within one device
  void binary(BinaryOp op, View a, View b, View y) const override;
  void unary(UnaryOp op, View x, View y, double slope) const override;
  void unary_backward(UnaryOp op, View saved, View dy, View dx, double slope) const override;
  void affine(View x, double scale, double shift, View y) const override;
  void pow_scalar(View x, double exponent, View y) const override;
  void axpby(double a, View x, double b, View y) const override;
  void dropout(View x, double p, std::uint64_t seed, std::uint64_t offset, View y) const override;
  void reduce(ReduceOp op, View x, View y, bool accumulate) const override;

  // matmul.h
  void matmul(View a, View b, View y, const MatmulOptions& options) const override;

  // conv.h
  void conv2d(View x, View weight, View bias, View y, const Conv2dOptions& options) const override;
  void conv2d_backward_data(View dy, View weight, View bias, View dx,
                            const Conv2dOptions& options) const override;
  void conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                              const Conv2dOptions& options, bool accumulate) const override;

  // pool.h
  void max_pool2d(View x, View y, View index, const Pool2dOptions& options) const override;
  void max_pool2d_backward(View dy, View index, View dx,
                           const Pool2dOptions& options) const override;
  void avg_pool2d(View x, View y, const Pool2dOptions& options) const override;
  void avg_pool2d_backward(View dy, View dx, const Pool2dOptions& options) const override;

  // norm.h
  void layer_norm(View x, View weight, View bias, double eps, View y, View mean,
                  View rstd) const override;
  void layer_norm_backward(View x, View weight, View mean, View rstd, View dy, View dx,
                           View dweight, View dbias, bool accumulate) const override;
  void rms_norm(View x, View weight, double eps, View y, View rstd) const override;
  void rms_norm_backward(View x, View weight, View rstd, View dy, View dx, View dweight,
                         bool accumulate) const override;
  void batch_norm(View x, View weight, View bias, View running_mean, View running_var, View y,
                  View mean, View rstd, const BatchNormOptions& options) const override;
  void batch_norm_eval(View x, View weight, View bias, View running_mean, View running_var, View y,
                       const BatchNormOptions& options) const override;
  void batch_norm_backward(View x, View y, View weight, View mean, View rstd, View dy, View dx,
                           View dweight, View dbias,
                           const BatchNormBackwardOptions& options) const override;

  // softmax.h, loss.h, embedding.h
  void softmax(View x, View y, const SoftmaxOptions& options) const override;
  void softmax_backward(View y, View dy, View dx, const SoftmaxOptions& options) const override;
  void cross_entropy(View logits, View target, View loss, View lse,
                     const CrossEntropyOptions& options) const override;
  void cross_entropy_backward(View logits, View target, View lse, View dloss, View dlogits,
                              const CrossEntropyOptions& options) const override;
  void mse(View x, View target, View loss) const override;
  void mse_backward(View x, View target, View dloss, View dx) const override;
  void bce_with_logits(View x, View target, View loss) const override;
  void bce_with_logits_backward(View x, View target, View dloss, View dx) const override;
  void bce(View p, View target, View loss) const override;
  void bce_backward(View p, View target, View dloss, View dp) const override;
  void embedding(View weight, View index, View y) const override;
  void embedding_backward(View dy, View index, View dweight, bool accumulate) const override;

  // multi_tensor.h
  void check_tensors(const std::vector<TensorView>& tensors, double p,
                     TensorCheck* checks) const override;
  void multi_tensor_linear(const LinearLists& lists, TensorCheck* checks) const override;
  void update_scale(View scale, View growth_tracker, View hysteresis_tracker, View found_inf,
                    const ScaleUpdateOptions& options) const override;
  void hash_tensors(const std::vector<TensorView>& tensors, std::uint64_t* hashes) const override;

  // optimizer_update.h
  void adam_update(const std::vector<UpdateEntry>& entries,
                   const AdamOptions& options) const override;
  void adam_device_update(const std::vector<UpdateEntry>& entries,
                          const AdamOptions& options) const override;
  void find_nonfinite(const std::vector<TensorView>& tensors, View found_inf) const override;
  void sgd_update(const std::vector<UpdateEntry>& entries,
                  const SgdOptions& options) const override;
  void adagrad_update(const std::vector<UpdateEntry>& entries,
                      const AdagradOptions& options) const override;
  void novograd_update(const std::vector<UpdateEntry>& entries,
                       const NovoGradOptions& options) const override;
  void lamb_update(const std::vector<UpdateEntry>& entries,
                   const LambOptions& options) const override;
  void join_master(View weight, View remainder, View out) const override;
  void split_master(View in, View weight, View remainder) const override;
  void reconcile_master(View weight, View master) const override;
};

}  // namespace cairn::kernels
