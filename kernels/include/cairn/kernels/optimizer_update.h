// The update passes of an optimizer over many tensors at once: unscale + clip + update + half
// write, one pass over each parameter.
//
// The lists are pointer tables: slices of a gradient arena and tensors of a foreign trainer look
// the same. All tensors are dense (their elements are visited in memory order; weight, master,
// moments and gradient of an entry share one layout), all on one device. One launch on CUDA for the
// whole list. An empty list and empty tensors do nothing. Arithmetic is in f32; updates run in the
// order of the device's current stream and do not wait. Entries must not overlap.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "cairn/core/half.h"
#include "cairn/core/tensor_view.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::kernels {

/// One parameter in an update. Undefined views are absent.
///
/// The true weight w that a rule works on is the f32 master, or is put together from a bf16 weight
/// and an i16 remainder (see join_master), or is the weight itself (which, if half, is then rounded
/// each step). A half weight is rounded once from its f32 master, to nearest even.
struct UpdateEntry {
  TensorView gradient;  // f16, bf16 or f32; read, never written
  TensorView weight;    // f16, bf16 or f32; written
  TensorView master;    // f32, or i16 beside a bf16 weight; written
  TensorView moment1;   // f32 or bf16 (rounded to nearest even): exp_avg, SGD's momentum buffer,
                        // Adagrad's state sum
  TensorView moment2;   // of moment1's dtype: exp_avg_sq
  /// Every rule sees g = gradient * options.gradient_scale * gradient_factor + l2 * w.
  double gradient_factor = 1.0;  // LARC's trust ratio; clipping by group
  double l2 = 0.0;
  double norm = 0.0;  // NovoGrad: the tensor's running norm n, already updated
};

// A rule is its options. Each names itself in errors (kName), says how many moments an entry needs
// and how much of the weight decay goes into g before the rule (l2).

/// 1 - beta^step, by which a moment that began at 0 is corrected. By squaring: hosts and devices
/// get the same bits, which pow of their libraries does not promise.
CAIRN_HOST_DEVICE inline double correction_of(double beta, std::int64_t step) {
  double power = 1.0;
  for (; step > 0; step >>= 1) {
    if (step & 1) power *= beta;
    beta *= beta;
  }
  return 1.0 - power;
}

/// What changes from step to step, in memory of the parameters' device, one element each: with it
/// no host takes part in a step, and a captured graph repeats whole ones. To capture an update (and
/// find_nonfinite), run the same list once before on the same stream: its table of pointers is
/// uploaded then, and stays for good once a capture used it.
struct DeviceStep {
  TensorView lr;          // f64; instead of the option
  TensorView step;        // i32; which update of these entries this is, from 1 (advance_step)
  TensorView loss_scale;  // f32; gradients are divided by it, too. May be absent
  TensorView found_inf;   // f32; where it is not 0 nothing is written. May be absent
  TensorView clip;        // f64; gradients are multiplied by it, too. May be absent
  /// correction1, correction2 = 1 - beta^step, or 1; the options' own count for nothing, nor does
  /// first_step.
  bool bias_correction = true;
  bool defined() const { return lr.defined() || step.defined(); }
};

/// step += 1 unless found_inf (f32, may be absent) is not 0. i32 [1]; before the updates that it
/// counts.
void advance_step(const TensorView& step, const TensorView& found_inf);

/// What find_nonfinite leaves on the device.
struct FoundNonfinite {
  TensorView found_inf;  // f32 [1]: 1 where an element of any tensor is inf or NaN, else 0
  TensorView each;  // f32 [tensors]: 1 for each of those; others stay as they are. May be absent
  /// f64 [1]: the coefficient that bounds the 2-norm n of all tensors together, times
  /// gradient_scale / loss_scale: max_norm / (n + eps) where n is larger, else 1. May be absent:
  /// costs nothing then.
  TensorView clip;
  double max_norm = 0.0, gradient_scale = 1.0, eps = 1e-6;
  TensorView loss_scale;  // f32 [1]; may be absent
};
/// Checks tensors (f16, bf16, f32) for a DeviceStep and for update_scale (update_scale.h); no host
/// waits.
void find_nonfinite(const std::vector<TensorView>& tensors, const FoundNonfinite& found);

/// Adam, per element:
///   adamw false: g += weight_decay w.  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   w -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) [+ weight_decay w if adamw])
/// m is moment1, v is moment2. Kingma & Ba 2015; Loshchilov & Hutter 2019.
struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool adamw = true;
  double correction1 = 1.0, correction2 = 1.0;  // 1 - beta^step, or 1 without bias correction
  double gradient_scale =
      1.0;  // 1 / loss scale * clip coefficient / count: whatever multiplies the gradient

  static constexpr const char* kName = "adam_update";
  int moments() const { return 2; }
  double l2() const { return adamw ? 0.0 : weight_decay; }
};

/// SGD as in apex.optimizers.FusedSGD: [g += wd w]; buf = first ? g : momentum buf + (1 -
/// dampening) g; g = nesterov ? g + momentum buf : buf; [g += wd w if wd_after_momentum]; w -= lr
/// g. moment1 is buf; absent where momentum is 0.
struct SgdOptions {
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false, wd_after_momentum = false;
  bool first_step = false;
  double gradient_scale = 1.0;

  static constexpr const char* kName = "sgd_update";
  int moments() const { return momentum != 0.0 ? 1 : 0; }
  double l2() const { return wd_after_momentum ? 0.0 : weight_decay; }
};

/// Adagrad, per element, with h = moment1 (the sum of squares):
///   adagrad_w false: g += weight_decay w.  h += g^2
///   w -= lr * (g / (sqrt(h) + eps) [+ weight_decay w if adagrad_w])
/// Duchi, Hazan & Singer 2011. A learning rate that decays is the caller's, except in a DeviceStep,
/// where lr is divided by 1 + (step - 1) lr_decay.
struct AdagradOptions {
  double lr = 1e-2, eps = 1e-10, weight_decay = 0.0, lr_decay = 0.0;
  bool adagrad_w = false;
  double gradient_scale = 1.0;

  static constexpr const char* kName = "adagrad_update";
  int moments() const { return 1; }
  double l2() const { return adagrad_w ? 0.0 : weight_decay; }
};

/// RMSprop, per element, with v = moment1 and b = moment2 (absent where momentum is 0):
///   g += weight_decay w.  v = alpha v + (1 - alpha) g^2;  u = g / (sqrt(v) + eps)
///   momentum: b = momentum b + u;  w -= lr b.  Else w -= lr u
/// As torch.optim.RMSprop, which adds eps to the root (Tieleman & Hinton 2012).
struct RmsPropOptions {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, momentum = 0.0, weight_decay = 0.0;
  double gradient_scale = 1.0;

  static constexpr const char* kName = "rmsprop_update";
  int moments() const { return momentum != 0.0 ? 2 : 1; }
  double l2() const { return weight_decay; }
};

/// NovoGrad, per element, with m = moment1, one running norm n = entry.norm for the whole tensor
/// and d = n / sqrt(correction2) + eps:
///   reg_inside_moment: g = g / d + weight_decay w;  m = b1 m + b3 g;  w -= lr m / correction1
///   otherwise:         m = b1 m + b3 g;  w -= lr ((m / correction1) / d + weight_decay w)
/// b3 = 1 - beta1 with grad_averaging, else 1. The caller keeps n: with the norm |g| of the scaled
/// gradient, n = sqrt(b2 n^2 + (1 - b2) |g|^2) (2-norm) or b2 n + (1 - b2) |g| (largest element).
/// Ginsburg et al. 2019.
struct NovoGradOptions {
  double lr = 1e-3, beta1 = 0.9, eps = 1e-8, weight_decay = 0.0;
  bool grad_averaging = true, reg_inside_moment = false;
  double correction1 = 1.0, correction2 = 1.0;  // 1 - beta^step, or 1 without bias correction
  double gradient_scale = 1.0;

  static constexpr const char* kName = "novograd_update";
  int moments() const { return 1; }
  double l2() const { return 0.0; }
};

/// LAMB, per element, with m = moment1 and v = moment2:
///   adamw false: g += weight_decay w.  m = b1 m + b3 g;  v = b2 v + (1 - b2) g^2
///   u = (m / correction1) / (sqrt(v / correction2) + eps) [+ weight_decay w if adamw]
///   w -= lr r u
/// b3 = 1 - beta1 with grad_averaging, else 1. r is the tensor's |w| / |u| (LambNorms) if
/// weight_decay is not 0 or use_nvlamb is set, and 1 otherwise and where either norm is 0. Clipping
/// by the global norm is the caller's, in gradient_scale. Two passes, with nothing between them but
/// norms, which stay on the device: the second takes u from the moments as stored. You et al. 2020.
struct LambOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0.01;
  bool adamw = true, grad_averaging = true, use_nvlamb = false;
  double correction1 = 1.0, correction2 = 1.0;  // 1 - beta^step, or 1 without bias correction
  double gradient_scale = 1.0;

  static constexpr const char* kName = "lamb_update";
  int moments() const { return 2; }
  double l2() const { return adamw ? 0.0 : weight_decay; }
};

/// Squared 2-norms of a tensor's true weight and of its u, in f64, summed as check_tensors sums.
struct LambNorms {
  double weight, update;
};

/// LAMB of tensors that ranks have parts of, in two calls between which the caller adds up norms:
/// update() of the whole tensors, bit for bit. The first updates the moments and finds LambNorms of
/// each entry: check 2 i is that of the weight, 2 i + 1 that of u. A part goes in as pieces_of()
/// it, and join_pieces() of all have the tensor's.
[[nodiscard]] PendingCheck begin_lamb_update(const std::vector<UpdateEntry>& pieces,
                                             const LambOptions& options);
/// The second updates the weights, by the norms of the whole tensor of each entry.
void end_lamb_update(const std::vector<UpdateEntry>& entries, const std::vector<LambNorms>& norms,
                     const LambOptions& options);

/// Updates every entry by the rule whose options these are: update(entries, AdamOptions{.lr =
/// 0.1}). Throws InvalidArgument "[adam_update] expected ..." for entries that do not fit. With a
/// DeviceStep all entries need one gradient_factor and one l2; NovoGrad throws Unsupported, since
/// its running norms are the caller's.
using UpdateRule = std::variant<AdamOptions, SgdOptions, AdagradOptions, RmsPropOptions,
                                NovoGradOptions, LambOptions>;
void update(const std::vector<UpdateEntry>& entries, const UpdateRule& rule,
            const DeviceStep& device = {});

/// out = the true weight. Its f32 bits are (bits of weight << 16) + remainder, modulo 2^32, with
/// the remainder's sign: half the memory of an f32 master, and exact. One shape and one dense
/// layout for all: weight bf16, remainder i16, out f32.
void join_master(const TensorView& weight, const TensorView& remainder, const TensorView& out);
/// The weight is `in` rounded to nearest bf16, halves away from zero (so it differs from rounding
/// to even at exact ties only), the remainder what that leaves. Exact for every f32 but NaN, whose
/// payload is dropped.
void split_master(const TensorView& in, const TensorView& weight, const TensorView& remainder);

/// Follows what somebody else wrote into a half weight: where the bits of an element of the weight
/// (f16 or bf16) are not those of its f32 master rounded to nearest even, the master becomes the
/// weight's value; elsewhere, NaN and the sign of 0 included, it keeps its bits. One shape and one
/// dense layout. A weight that split_master rounded differs at exact ties: reconcile_remainder is
/// for those.
void reconcile_master(const TensorView& weight, const TensorView& master);
/// The same of a bf16 weight and its i16 remainder: where the bits of an element are no longer
/// those of `former` (bf16), what the weight was when the two agreed, the remainder becomes 0.
void reconcile_remainder(const TensorView& weight, const TensorView& former,
                         const TensorView& remainder);

}  // namespace cairn::kernels
