// The differentiable operations. Each is recorded on the tape where gradients are on; shapes
// broadcast as in NumPy; errors name the op.
//
// Views (reshape, transpose, permute, slice, expand) share memory with their input where the layout
// allows.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/conv.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/pool.h"
#include "cairn/kernels/resample.h"
#include "cairn/kernels/softmax.h"

namespace cairn::autograd {

// Element-wise. a and b broadcast; mixed floating dtypes promote to the widest.
Tensor add(const Tensor& a, const Tensor& b);
Tensor add_relu(const Tensor& a, const Tensor& b);  // relu(a + b) in one pass: of a residual sum
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);
Tensor maximum(const Tensor& a, const Tensor& b);
Tensor minimum(const Tensor& a, const Tensor& b);
Tensor atan2(const Tensor& a, const Tensor& b);  // the angle of the point (b, a), in radians
/// op is eq, ne, lt, le, gt or ge. Boolean result, no gradient.
Tensor compare(kernels::BinaryOp op, const Tensor& a, const Tensor& b);
Tensor eq(const Tensor& a, const Tensor& b);
Tensor ne(const Tensor& a, const Tensor& b);
Tensor lt(const Tensor& a, const Tensor& b);
Tensor le(const Tensor& a, const Tensor& b);
Tensor gt(const Tensor& a, const Tensor& b);
Tensor ge(const Tensor& a, const Tensor& b);
/// a where the condition (boolean) holds, else b; all three broadcast. What is not taken may be inf
/// or NaN: its gradient is 0.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor affine(const Tensor& x, double scale, double shift);  // scale * x + shift
/// x between low and high, which may be infinite; the gradient passes where low <= x <= high.
Tensor clamp(const Tensor& x, double low, double high);
Tensor abs(const Tensor& x);
Tensor neg(const Tensor& x);
Tensor rsqrt(const Tensor& x);
Tensor square(const Tensor& x);
Tensor pow(const Tensor& x, double exponent);
Tensor pow(const Tensor& x, const Tensor& exponent);  // of one dtype, or in an autocast region
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor relu(const Tensor& x);
Tensor leaky_relu(const Tensor& x, double slope = 0.01);
Tensor gelu(const Tensor& x, bool tanh_approximation = false);
Tensor silu(const Tensor& x);
/// x where it is above 0, else alpha (exp(x) - 1).
Tensor elu(const Tensor& x, double alpha = 1.0);
/// x where it is above 0, else x times the weight, which broadcasts: [1], or [C, 1, 1] for images.
Tensor prelu(const Tensor& x, const Tensor& weight);
Tensor softplus(const Tensor& x);           // log(1 + exp(x))
Tensor mish(const Tensor& x);               // x tanh(softplus(x))
Tensor dropout(const Tensor& x, double p);  // draws from core::Generator::current()

// Reductions over the given dimensions; none given means all. keep_dims leaves them with size 1.
Tensor sum(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false);
Tensor mean(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false);
/// The gradient is split evenly among equals.
Tensor max(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false);
Tensor min(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false);
/// The mean of (x - mean)^2, times n / (n - correction) of n values.
Tensor var(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false,
           double correction = 1.0);
/// The root of the sum of squares. The gradient is 0 where the norm is.
Tensor norm(const Tensor& x, const std::vector<int>& dims = {}, bool keep_dims = false);
Tensor argmax(
    const Tensor& x);  // over the last dimension: i64, no gradient; the first of equals, or of NaN
Tensor argmin(const Tensor& x);
/// The k largest elements of each row of x [..., V], or the smallest, in order: values [..., k],
/// which have a gradient, and their places [..., k] i64. Of equals the first comes first; NaN is
/// larger than all.
struct TopK {
  Tensor values, index;
};
TopK topk(const Tensor& x, std::int64_t k, bool largest = true);
TopK sort(const Tensor& x, bool descending = false);  // each row, as topk
/// Along a dimension: y[i] = x[0] + ... + x[i].
Tensor cumsum(const Tensor& x, int dim);
/// x [..., V], index [..., K] i64 in 0..V-1: the elements of each row at these places, [..., K].
Tensor gather(const Tensor& x, const Tensor& index);
/// x [..., V], index [..., K] i64 in 0..V-1, source [..., K]: a new tensor of x, with the elements
/// of each row of the source added at these places, in order where several share one. An index
/// outside throws InvalidArgument on the CPU; a GPU is not waited for.
Tensor scatter_add(const Tensor& x, const Tensor& index, const Tensor& source);
/// Along a dimension: the entries at these places (index [K] i64), in their order. An index outside
/// throws InvalidArgument on the CPU; on a GPU its entry is NaN.
Tensor index_select(const Tensor& x, int dim, const Tensor& index);
Tensor flip(const Tensor& x, int dim);  // along a dimension: the last entry first

// Made of numbers; no gradient.
/// begin, begin + 1 ... end - 1.
Tensor arange(std::int64_t begin, std::int64_t end, DType dtype = DType::i64,
              Device device = core::default_device());
/// Normal values, mean 0 and variance 1, of core::Generator::current(); the same on any device.
Tensor randn(const Shape& shape, DType dtype = DType::f32, Device device = core::default_device());
/// index [...] i64 in 0..classes-1: [..., classes], 1 there and 0 elsewhere.
Tensor one_hot(const Tensor& index, std::int64_t classes, DType dtype = DType::f32);

/// x [..., M, N] on and below the diagonal (column - row <= diagonal), 0 above it.
Tensor tril(const Tensor& x, std::int64_t diagonal = 0);
/// On and above the diagonal (column - row >= diagonal), 0 below it.
Tensor triu(const Tensor& x, std::int64_t diagonal = 0);
/// x, but the value where the mask (boolean, broadcasts) holds.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);

// Shape and type.
Tensor reshape(const Tensor& x, const Shape& shape);  // one size may be -1; copies where it must
Tensor flatten(const Tensor& x, int start_dim = 1);
Tensor transpose(const Tensor& x, int dim0, int dim1);
Tensor permute(const Tensor& x, const Shape& order);
Tensor expand(const Tensor& x, const Shape& shape);
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end);
Tensor select(const Tensor& x, int dim, std::int64_t index);  // drops the dimension
Tensor squeeze(const Tensor& x, int dim);    // without this dimension, which is of size 1
Tensor unsqueeze(const Tensor& x, int dim);  // with another of size 1 there
/// Parts of `size` along a dimension, the last one of what is left.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim = 0);
/// So many values more before and behind the dimension's own.
Tensor pad(const Tensor& x, int dim, std::int64_t before, std::int64_t behind, double value = 0.0);
Tensor concat(const std::vector<Tensor>& xs, int dim = 0);
Tensor stack(const std::vector<Tensor>& xs, int dim = 0);  // along a new dimension
Tensor contiguous(const Tensor& x);
Tensor channels_last(const Tensor& x);  // [N, C, H, W], stored N H W C
Tensor to(const Tensor& x, DType dtype);
Tensor to(const Tensor& x, Device device);

// Products, convolutions, pools.
Tensor matmul(const Tensor& a, const Tensor& b);  // [..., M, K] x [..., K, N]
/// NumPy's, of one or two tensors: "bhtd,bhsd->bhts" multiplies values at the same letters and adds
/// up over letters that the result has not. Lower-case letters, each once in a tensor.
Tensor einsum(std::string_view formula, const std::vector<Tensor>& xs);
using kernels::Activation;
/// x [..., I], weight [O, I], bias [O] or undefined; the activation runs in the product's epilogue.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              Activation activation = Activation::none);
/// y[..., o] = a^T weight[o] b + bias[o]. a [..., I], b [..., J], weight [O, I, J], bias [O] or
/// undefined.
Tensor bilinear(const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const kernels::Conv2dOptions& options = {});
struct Conv1dOptions {
  std::int64_t stride = 1, padding = 0, dilation = 1, groups = 1;
};
/// conv2d of images of height 1: x [N, I, L], weight [O, I / groups, k].
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const Conv1dOptions& options = {});
struct Conv3dOptions {  // depth, height, width
  std::array<std::int64_t, 3> stride{1, 1, 1}, padding{0, 0, 0}, dilation{1, 1, 1};
  std::int64_t groups = 1;
};
/// x [N, I, D, H, W], weight [O, I / groups, kD, kH, kW]. conv2d of the kD slices of the depth
/// under the kernel side by side, as channels: the backward keeps these, kD / stride times the size
/// of x. Results lie N D H W C.
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const Conv3dOptions& options = {});
/// x [N, I, H, W], weight [I, O / groups, kH, kW]; output size (H - 1) stride - 2 padding +
/// dilation (kH - 1) + output_padding + 1.
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const kernels::Conv2dOptions& options = {},
                        std::array<std::int64_t, 2> output_padding = {0, 0});
Tensor max_pool2d(const Tensor& x, const kernels::Pool2dOptions& options = {});
Tensor avg_pool2d(const Tensor& x, const kernels::Pool2dOptions& options = {});
Tensor global_avg_pool2d(const Tensor& x);  // [N, C, H, W] -> [N, C]
/// [N, C, H, W] -> [N, C, size[0], size[1]]: means and maxima of windows that share the image out
/// evenly, from floor(i H / size) to ceil((i + 1) H / size).
Tensor adaptive_avg_pool2d(const Tensor& x, std::array<std::int64_t, 2> size);
Tensor adaptive_max_pool2d(const Tensor& x, std::array<std::int64_t, 2> size);
/// [N, C, H, W] -> [N, C, size[0], size[1]] by the nearest pixel, bilinearly or by areas.
using kernels::ResampleMode;
using kernels::ResampleOptions;
Tensor interpolate(const Tensor& x, std::array<std::int64_t, 2> size,
                   const ResampleOptions& options = {});
/// weight [V, D], index [...] i64 -> [..., D].
Tensor embedding(const Tensor& weight, const Tensor& index);

// Normalisations.
/// Layer and RMS norm are over the last dimension; weight and bias [D] may be undefined.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps = 1e-6);
/// x [N, C, ...]: each of the `groups` groups of channels has mean 0 and variance 1, then weight
/// and bias [C], which may be undefined. C a multiple of groups.
Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps = 1e-5);
/// x [N, C] or [N, C, H, W]; weight, bias, running_mean and running_var [C] may be undefined.
using kernels::BatchNormOptions;
/// Training updates running_mean and running_var in place (not while recomputing).
Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& options = {});
/// Softmax and log-softmax are over the last dimension. `lengths` [x.size(0)] i64 takes the place
/// of the options' view: rows of x[b] see columns 0 .. lengths[b] - 1 only.
Tensor softmax(const Tensor& x, const kernels::SoftmaxOptions& options = {},
               const Tensor& lengths = {});
Tensor log_softmax(const Tensor& x);

// Losses.
enum class Reduction { none, mean, sum };
struct CrossEntropyOptions {
  Reduction reduction = Reduction::mean;  // mean over the targets that are not ignored
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
};
/// logits [..., V], target [...] i64. Losses are f32 (f64 for f64 inputs).
Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                     const CrossEntropyOptions& options = {});
/// cross_entropy(linear(x, weight, bias), target), whose logits [..., V] are never in memory:
/// chunks of rows of some megabytes come and go. x [..., C], weight [V, C], bias [V] or none. The
/// forward makes the gradients along with each chunk and keeps them until the backward, in f32: the
/// size of x and weight, as long as plain in time. `recompute` keeps nothing but x and a number a
/// row, and makes the logits twice: a third more products. So does Reduction::none.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& target, const CrossEntropyOptions& options = {},
                            bool recompute = false);
struct NllOptions {
  Reduction reduction = Reduction::mean;  // mean over the targets that are not ignored
  std::int64_t ignore_index = -100;
};
/// -x at the target: x [..., V] holds log-probabilities, target [...] i64. (cross_entropy takes
/// logits.)
Tensor nll_loss(const Tensor& x, const Tensor& target, const NllOptions& options = {});
Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);
/// |x - target|.
Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);
/// With d = |x - target|: d^2 / (2 beta) where d < beta, else d - beta / 2. beta > 0.
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean,
                      double beta = 1.0);
/// delta times smooth_l1_loss with beta = delta > 0.
Tensor huber_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean,
                  double delta = 1.0);
/// target (log target - x), 0 where the target is: x holds log-probabilities, target probabilities,
/// or with log_target their logarithms. The mean is over all elements; divide the sum by the rows
/// for the divergence of distributions (PyTorch's batchmean).
Tensor kl_div(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean,
              bool log_target = false);
Tensor bce_with_logits(const Tensor& x, const Tensor& target,
                       Reduction reduction = Reduction::mean);
/// Of probabilities in [0, 1] (NaN outside). Refuses half inputs in an autocast region; see
/// docs/autocast.md.
Tensor binary_cross_entropy(const Tensor& p, const Tensor& target,
                            Reduction reduction = Reduction::mean);

/// The cosine of the angle between a and b along a dimension, which goes: a b / (max(|a|, eps)
/// max(|b|, eps)).
Tensor cosine_similarity(const Tensor& a, const Tensor& b, int dim = 1, double eps = 1e-8);
/// a, b [..., D], target [...] of 1 and -1: 1 - cos where a and b belong together, max(0, cos -
/// margin) where they do not.
Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& target,
                             Reduction reduction = Reduction::mean, double margin = 0.0);
struct TripletOptions {
  Reduction reduction = Reduction::mean;
  double margin = 1.0;
  double p = 2.0;  // of the norm
  double eps = 1e-6;
  bool swap = false;  // the negative's distance: from anchor or positive, whichever is nearer
};
/// max(0, margin + |anchor - positive| - |anchor - negative|), all [..., D], with |x| = (sum |x +
/// eps|^p)^(1/p).
Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& options = {});
struct CtcOptions {
  std::int64_t blank = 0;
  Reduction reduction = Reduction::mean;  // of the losses over their targets' lengths
  bool zero_infinity = false;  // sequences too short for their targets: loss and gradient are 0
};
/// Graves et al. 2006 (formula: kernels/ctc.h). log_probs [T, N, C], from log_softmax; targets [N,
/// S] i64, of which the first target_lengths[n] count; input_lengths and target_lengths [N] i64.
Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, const CtcOptions& options = {});

/// One layer and direction of an LSTM over T steps (formulas: kernels/lstm.h). x [T, B, I]; ih [4
/// H, I], hh [4 H, H] and the biases [4 H], which may be undefined, hold the gates in the order i f
/// g o.
struct LstmWeights {
  Tensor ih, hh, bias_ih, bias_hh;
};
struct LstmOptions {
  Tensor h, c;           // [B, H], before the first step; undefined: zeros
  Tensor lengths;        // [B] i64, on x's device; undefined: all sequences have T steps
  bool reverse = false;  // from the last step to the first
};
/// y [T, B, H]; h and c [B, H] after the last step. After its end (in reverse: before it) a
/// sequence keeps its state, in y too.
struct LstmResult {
  Tensor y, h, c;
};
/// All of one dtype. The backward keeps x, h, c and the four gates of each step, in that dtype; c
/// is carried from step to step in f32.
LstmResult lstm(const Tensor& x, const LstmWeights& weights, const LstmOptions& options = {});

/// softmax(q k^T / sqrt(D)) v. q [B, H, T, D], k and v [B, G, S, D] with H a multiple of G: H / G
/// neighbouring heads of q share one of k and v (grouped queries). causal: row t sees columns 0
/// .. t + S - T. key_lengths [B] i64 on their device, or undefined: of sample b's keys only the
/// first key_lengths[b] (0 .. S) are seen, what follows is padding (finite values; its gradients
/// are 0). A row that sees nothing gives 0. The result lies as q does.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                    double dropout = 0.0, const Tensor& key_lengths = {});
/// The same of one packed tensor, without copying heads apart: qkv [B, T, (heads + 2 kv_heads) D] =
/// q | k | v, q [B, T, heads, D], k and v [B, T, kv_heads, D]; kv_heads 0: as many as heads. Result
/// [B, T, heads D].
Tensor self_attention(const Tensor& qkv, std::int64_t heads, bool causal, double dropout = 0.0,
                      const Tensor& key_lengths = {}, std::int64_t kv_heads = 0);

}  // namespace cairn::autograd

// Operators live in Tensor's namespace, where argument-dependent lookup finds them.
namespace cairn::core {
Tensor operator+(const Tensor& a, const Tensor& b);
Tensor operator-(const Tensor& a, const Tensor& b);
Tensor operator*(const Tensor& a, const Tensor& b);
Tensor operator/(const Tensor& a, const Tensor& b);
Tensor operator+(const Tensor& a, double b);
Tensor operator-(const Tensor& a, double b);
Tensor operator*(const Tensor& a, double b);
Tensor operator/(const Tensor& a, double b);
Tensor operator*(double a, const Tensor& b);
Tensor operator-(const Tensor& a);
}  // namespace cairn::core
