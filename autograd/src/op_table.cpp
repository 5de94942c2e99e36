// The one table of what autocast does: Apex's O1 lists, torch.amp's CUDA lists, Cairn's operations.
#include <algorithm>
#include <array>

#include "cairn/autograd/autocast.h"
#include "cairn/core/error.h"

namespace cairn::autograd {

namespace {

constexpr ListPolicy kNone = ListPolicy::unlisted, kHalf = ListPolicy::half, kF32 = ListPolicy::f32,
                     kPromote = ListPolicy::promote, kSequence = ListPolicy::sequence,
                     kBanned = ListPolicy::banned;
using P = CastPolicy;

constexpr auto kRows = std::to_array<OpRow>({
    // Products and convolutions.
    {"linear", kHalf, kHalf, "linear", P::half, "matrix product", ""},
    {"matmul, mm, __matmul__", kHalf, kHalf, "matmul", P::half, "matrix product", ""},
    {"bmm", kHalf, kHalf, "matmul", P::half, "matrix product", "Apex: f32 before CUDA 9.1"},
    {"mv, addmm, addmv, addr, addbmm, baddbmm", kHalf, kHalf, "", P::keep, "",
     "matmul of reshaped operands, then add"},
    {"chain_matmul, linalg_multi_dot, einsum, linalg_vecdot", kNone, kHalf, "", P::keep, "", ""},
    {"conv2d", kHalf, kHalf, "conv2d", P::half, "convolution", ""},
    {"conv_transpose2d", kHalf, kHalf, "conv_transpose2d", P::half, "convolution", ""},
    {"conv1d", kHalf, kHalf, "conv1d", P::half, "convolution", ""},
    {"conv3d", kHalf, kHalf, "conv3d", P::half, "convolution", ""},
    {"conv_tbc, conv_transpose1d, conv_transpose3d", kHalf, kHalf, "", P::keep, "", ""},
    {"convolution, _convolution, cudnn_convolution, cudnn_convolution_transpose", kNone, kHalf, "",
     P::keep, "", "torch's internal names"},
    {"scaled_dot_product_attention", kNone, kHalf, "attention", P::half, "matrix products",
     "the softmax inside sums in f32"},
    {"self_attention", kNone, kNone, "self_attention", P::half, "matrix products",
     "attention of one packed projection; the softmax inside sums in f32"},
    {"prelu", kHalf, kHalf, "", P::keep, "", ""},
    {"lstm_cell", kHalf, kHalf, "lstm", P::half, "matrix products",
     "nn::LSTMCell is lstm of one step"},
    {"gru_cell, rnn_tanh_cell, rnn_relu_cell", kHalf, kHalf, "", P::keep, "",
     "nn::GRUCell and nn::RNNCell are made of linear, sigmoid and tanh"},
    {"_thnn_fused_lstm_cell, _thnn_fused_gru_cell", kNone, kHalf, "", P::keep, "",
     "torch's internal names"},
    {"lstm", kHalf, kNone, "lstm", P::half, "matrix products",
     "the cell is carried from step to step in f32"},
    {"rnn, gru", kHalf, kNone, "", P::keep, "",
     "nn::RNN and nn::GRU are made of linear, sigmoid and tanh"},

    // Exponentials and powers.
    {"exp", kF32, kF32, "exp", P::f32, "half overflows at exp(11.1)", ""},
    {"log", kF32, kF32, "log", P::f32, "half digits vanish near 1", ""},
    {"pow, __pow__, __rpow__, __ipow__", kF32, kF32, "pow", P::f32, "powers overflow half",
     "no in-place operations"},
    {"rsqrt", kF32, kF32, "rsqrt", P::f32, "large near 0", ""},
    {"square", kNone, kNone, "square", P::f32, "squares overflow f16 at 256", "pow, in both lists"},
    {"acos, asin, cosh, erfinv, expm1, log10, log2, reciprocal, sinh, tan", kF32, kF32, "", P::keep,
     "", ""},
    {"log1p", kNone, kF32, "", P::keep, "", ""},
    {"sqrt", kNone, kNone, "sqrt", P::keep, "", ""},

    // Sums.
    {"sum", kF32, kF32, "sum", P::f32, "sums in f32", ""},
    {"mean", kNone, kNone, "mean", P::f32, "sums in f32",
     "a mean is a sum: its half rounding loses what the f32 sum of sum keeps (Apex listed it "
     "before "
     "torch 1.1)"},
    {"max, amax", kNone, kNone, "max", P::keep, "", ""},
    {"argmax", kNone, kNone, "argmax", P::keep, "", ""},
    {"topk", kNone, kNone, "topk", P::keep, "", "the places; the values are gathered"},
    {"cumsum", kF32, kF32, "cumsum", P::f32, "sums in f32", ""},
    {"prod, cumprod", kF32, kF32, "", P::keep, "", ""},
    {"norm, dist, renorm", kF32, kF32, "", P::keep, "", ""},
    {"std, var", kF32, kNone, "", P::keep, "", ""},
    {"pdist, cdist, logsumexp, frobenius_norm, nuclear_norm, linalg_vector_norm, "
     "linalg_matrix_norm",
     kNone, kF32, "", P::keep, "", ""},

    // Softmax and normalisation.
    {"softmax", kF32, kF32, "softmax", P::f32, "softmax sums", ""},
    {"log_softmax", kF32, kF32, "log_softmax", P::f32, "softmax sums", ""},
    {"softmin", kF32, kNone, "", P::keep, "", "softmax of -x"},
    {"softplus", kF32, kF32, "", P::keep, "", ""},
    {"layer_norm", kF32, kF32, "layer_norm", P::f32, "mean and variance", ""},
    {"native_layer_norm", kNone, kF32, "layer_norm", P::f32, "mean and variance",
     "torch's internal name"},
    {"group_norm", kF32, kF32, "group_norm", P::f32, "mean and variance", ""},
    {"rms_norm", kNone, kNone, "rms_norm", P::f32, "mean of squares",
     "squares overflow f16 at 256; its siblings are f32 in both lists"},
    {"batch_norm", kNone, kNone, "batch_norm", P::keep, "",
     "statistics are f32 inside, whatever x is"},
    {"SyncBatchNorm", kNone, kNone, "sync_batch_norm", P::keep, "",
     "as batch_norm; what travels between ranks is f32"},
    {"interpolate", kF32, kNone, "interpolate", P::f32, "weighted sums", ""},
    {"upsample_nearest, upsample_bilinear", kNone, kF32, "interpolate", P::f32, "weighted sums",
     "torch's internal names of interpolate"},
    {"upsample_bicubic, upsample_linear, upsample_trilinear", kNone, kF32, "", P::keep, "", ""},
    {"instance_norm", kNone, kNone, "group_norm", P::f32, "mean and variance",
     "group_norm of as many groups as channels; half would lose the sums' digits"},
    {"local_response_norm, normalize, grid_sample", kF32, kNone, "", P::keep, "", ""},
    {"cosine_similarity", kF32, kF32, "cosine_similarity", P::f32, "sums of squares", ""},

    // Losses.
    {"cross_entropy", kF32, kNone, "cross_entropy", P::keep, "f32 inside, no copy of the logits",
     "the kernel widens half logits as it reads them and its loss is f32: same digits as Apex's "
     "cast, without an f32 copy of the largest tensor of a language model"},
    {"linear_cross_entropy", kNone, kNone, "linear_cross_entropy", P::half, "matrix products",
     "the loss and all sums are f32; the logits are half, chunk by chunk"},
    {"nll_loss", kF32, kF32, "nll_loss", P::f32, "a loss", "of logits: cross_entropy"},
    {"nll_loss2d", kNone, kF32, "", P::keep, "", ""},
    {"mse_loss", kF32, kF32, "mse_loss", P::f32, "a loss", ""},
    {"binary_cross_entropy_with_logits", kF32, kF32, "bce_with_logits", P::f32, "a loss", ""},
    {"binary_cross_entropy", kBanned, kBanned, "binary_cross_entropy", P::banned,
     "half probabilities round to 0 and 1",
     "refuses half inputs only; f32 inputs are fine in a region, as in Apex"},
    {"l1_loss", kF32, kF32, "l1_loss", P::f32, "a loss", ""},
    {"smooth_l1_loss", kF32, kF32, "smooth_l1_loss", P::f32, "a loss", ""},
    {"kl_div", kF32, kF32, "kl_div", P::f32, "a loss", ""},
    {"cosine_embedding_loss", kF32, kF32, "cosine_embedding_loss", P::f32, "a loss", ""},
    {"triplet_margin_loss", kF32, kF32, "triplet_margin_loss", P::f32, "a loss", ""},
    {"ctc_loss", kF32, kNone, "ctc_loss", P::f32, "a loss",
     "as Apex: sums over all paths in half digits say nothing"},
    {"poisson_nll_loss, hinge_embedding_loss, margin_ranking_loss, multilabel_margin_loss, "
     "soft_margin_loss, multi_margin_loss",
     kF32, kF32, "", P::keep, "", ""},
    {"multilabel_soft_margin_loss", kF32, kNone, "", P::keep, "", ""},
    {"huber_loss", kNone, kF32, "huber_loss", P::f32, "a loss", ""},

    // Promotion.
    {"add, __add__, __radd__, __iadd__", kPromote, kNone, "add", P::promote, "",
     "no in-place operations"},
    {"sub, __sub__, __rsub__, __isub__", kPromote, kNone, "sub", P::promote, "",
     "no in-place operations"},
    {"mul, __mul__, __rmul__, __imul__", kPromote, kNone, "mul", P::promote, "",
     "no in-place operations"},
    {"div, __div__, __rdiv__, __idiv__, __truediv__, __rtruediv__, __itruediv__", kPromote, kNone,
     "div", P::promote, "", "no in-place operations"},
    {"eq, ge, gt, le, lt, ne, __eq__, __ge__, __gt__, __le__, __lt__, __ne__", kPromote, kNone,
     "compare", P::promote, "", ""},
    {"maximum", kNone, kNone, "maximum", P::promote, "",
     "torch's own type promotion does the same, without a list"},
    {"minimum", kNone, kNone, "minimum", P::promote, "", "as maximum"},
    {"where", kNone, kNone, "where", P::promote, "", "as maximum; the condition is boolean"},
    {"relu(add)", kNone, kNone, "add_relu", P::promote, "", "of a residual sum, in one pass"},
    {"atan2", kPromote, kPromote, "atan2", P::promote, "", ""},
    {"equal", kPromote, kNone, "", P::keep, "", ""},
    {"bilinear", kPromote, kPromote, "bilinear", P::promote, "", ""},
    {"addcdiv, addcmul, cross, dot", kPromote, kPromote, "", P::keep, "", ""},
    {"vdot, grid_sampler, index_put, tensordot", kNone, kPromote, "", P::keep, "", ""},
    {"scatter_add", kNone, kPromote, "scatter_add", P::promote, "", "along the last dimension"},
    {"cat", kSequence, kNone, "concat", P::promote, "",
     "f16 with bf16 gives f32, where Apex passes the mix through"},
    {"stack", kSequence, kNone, "stack", P::promote, "",
     "f16 with bf16 gives f32, where Apex passes the mix through"},

    // As the input comes.
    {"relu", kNone, kNone, "relu", P::keep, "", ""},
    {"leaky_relu", kNone, kNone, "leaky_relu", P::keep, "", ""},
    {"silu", kNone, kNone, "silu", P::keep, "", ""},
    {"gelu", kF32, kNone, "gelu", P::keep, "",
     "as torch; the kernel computes in f32 and rounds once"},
    {"tanh", kNone, kNone, "tanh", P::keep, "", ""},
    {"sigmoid", kNone, kNone, "sigmoid", P::keep, "", ""},
    {"abs", kNone, kNone, "abs", P::keep, "", ""},
    {"neg", kNone, kNone, "neg", P::keep, "", ""},
    {"clamp", kNone, kNone, "clamp", P::keep, "", ""},
    {"dropout", kNone, kNone, "dropout", P::keep, "", ""},
    {"max_pool2d", kNone, kNone, "max_pool2d", P::keep, "", ""},
    {"avg_pool2d", kNone, kNone, "avg_pool2d", P::keep, "", ""},
    {"adaptive_avg_pool2d", kNone, kNone, "adaptive_avg_pool2d", P::keep, "", ""},
    {"adaptive_max_pool2d", kNone, kNone, "max_pool2d", P::keep, "", ""},
    {"embedding", kNone, kNone, "embedding", P::keep, "", ""},
    {"gather", kNone, kNone, "gather", P::keep, "", "along the last dimension"},
    {"scale * x + shift", kNone, kNone, "affine", P::keep, "", ""},
    {"reshape, view, flatten", kNone, kNone, "reshape", P::keep, "", ""},
    {"transpose", kNone, kNone, "transpose", P::keep, "", ""},
    {"permute", kNone, kNone, "permute", P::keep, "", ""},
    {"expand", kNone, kNone, "expand", P::keep, "", ""},
    {"slice, narrow", kNone, kNone, "slice", P::keep, "", ""},
    {"contiguous", kNone, kNone, "relayout", P::keep, "", ""},
    {"unfold(depth)", kNone, kNone, "unfold_depth", P::keep, "", "inside of conv3d"},
    {"cpu", kF32, kNone, "copy_to", P::keep, "",
     "a copy changes no digits; Apex listed it so that NumPy gets f32"},
    {"to(device)", kNone, kNone, "copy_to", P::keep, "", ""},
    {"replicate", kNone, kNone, "replicate", P::keep, "",
     "of DataParallel: a handle, no arithmetic"},
    {"to(dtype)", kNone, kNone, "cast", P::keep, "", "the conversion itself"},
});

}  // namespace

std::span<const OpRow> op_table() {
  return kRows;
}

const OpRow* find_op(std::string_view cairn_name) {
  const auto row = std::find_if(kRows.begin(), kRows.end(), [&](const OpRow& candidate) {
    return !cairn_name.empty() && candidate.cairn == cairn_name;
  });
  return row == kRows.end() ? nullptr : &*row;
}

std::string_view name(CastPolicy policy) {
  switch (policy) {
    case CastPolicy::keep:
      return "keep";
    case CastPolicy::half:
      return "half";
    case CastPolicy::f32:
      return "f32";
    case CastPolicy::promote:
      return "promote";
    case CastPolicy::banned:
      return "banned";
  }
  return "?";
}

std::string_view name(ListPolicy policy) {
  switch (policy) {
    case ListPolicy::unlisted:
      return "-";
    case ListPolicy::half:
      return "half";
    case ListPolicy::f32:
      return "f32";
    case ListPolicy::promote:
      return "promote";
    case ListPolicy::sequence:
      return "sequence";
    case ListPolicy::banned:
      return "banned";
  }
  return "?";
}

namespace {

// Markdown takes * and _ for emphasis.
std::string code(std::string_view names) {
  std::string quoted = "`";
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool separator = names.substr(i, 2) == ", ";
    quoted += separator ? "`, `" : std::string(1, names[i]);
    i += separator ? 1 : 0;
  }
  return quoted + "`";
}

}  // namespace

std::string op_table_markdown() {
  std::string text =
      "| operation | Apex | torch.amp | Cairn | Cairn's name | why, and where it differs |\n"
      "|---|---|---|---|---|---|\n";
  for (const OpRow& row : kRows) {
    const bool has = !row.cairn.empty();
    std::string why(row.reason);
    if (!why.empty() && !row.note.empty()) why += "; ";
    why += row.note;
    text += core::str("| ", code(row.name), " | ", name(row.apex), " | ", name(row.torch), " | ",
                      has ? name(row.policy) : "", " | ", has ? code(row.cairn) : "", " | ", why,
                      " |\n");
  }
  return text;
}

}  // namespace cairn::autograd
