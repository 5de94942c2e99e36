// CUDA's own kernels that are bound by memory, each alone and on tensors that no cache holds.
#include <functional>
#include <utility>

#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/embedding.h"
#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/kernels/softmax.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;
using kernels::BinaryOp;
using kernels::UnaryOp;

/// A matrix in bf16, unless said otherwise.
struct Sizes {
  std::int64_t rows, columns;
  std::int64_t elements() const { return rows * columns; }
  Tensor matrix(DType dtype = DType::bf16) const { return random({rows, columns}, dtype); }
  Tensor row(DType dtype = DType::f32) const { return random({columns}, dtype); }
  Tensor per_row() const { return Tensor::full({rows}, 0.5); }
};

/// `per_element`: bytes of each element of the matrix.
Work work(const Sizes& s, const char* name, double per_element, const char* kernels,
          std::function<Run()> prepare) {
  Work w{name, std::move(prepare)};
  w.bytes = per_element * static_cast<double>(s.elements());
  w.kernels = kernels;
  return w;
}

std::vector<Work> element_works(const Sizes& s) {
  return {
      work(s, "convert_f32_to_bf16", 6, "^map_kernel<Convert<float, BFloat16>",
           [s] {
             const Tensor x = s.matrix(DType::f32), y = s.matrix();
             return [=] { kernels::copy(x, y); };
           }),
      work(s, "gelu_bf16", 4, "^map_kernel<Unary<BFloat16>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix();
             return [=] { kernels::unary(UnaryOp::gelu, x, y); };
           }),
      work(s, "gelu_backward_bf16", 6, "^map_kernel<UnaryBackward<BFloat16>",
           [s] {
             const Tensor x = s.matrix(), dy = s.matrix(), dx = s.matrix();
             return [=] { kernels::unary_backward(UnaryOp::gelu, x, dy, dx); };
           }),
      work(s, "add_bf16", 6, "^map_kernel<Binary<BFloat16>",
           [s] {
             const Tensor a = s.matrix(), b = s.matrix(), y = s.matrix();
             return [=] { kernels::binary(BinaryOp::add, a, b, y); };
           }),
      work(s, "add_row_bf16", 4, "^map_strided_kernel<Binary<BFloat16>",
           [s] {
             const Tensor a = s.matrix(), b = s.row(DType::bf16), y = s.matrix();
             return [=] { kernels::binary(BinaryOp::add, a, b, y); };
           }),
      work(s, "axpby_bf16_into_f32", 10, "^map_kernel<Axpby<BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix(DType::f32);
             return [=] { kernels::axpby(0.5, x, 0.5, y); };
           }),
      work(s, "dropout_bf16", 4, "^dropout_kernel<BFloat16>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix();
             return [=] { kernels::dropout(x, 0.1, 1, 2, y); };
           }),
      work(s, "mse_bf16", 8, "^map_kernel<SquaredError<BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), t = s.matrix(), loss = s.matrix(DType::f32);
             return [=] { kernels::mse(x, t, loss); };
           }),
      work(s, "bce_with_logits_backward_bf16", 10,
           "^map_kernel<BinaryCrossEntropyBackward<BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), t = s.matrix(), dloss = s.matrix(DType::f32),
                          dx = s.matrix();
             return [=] { kernels::bce_with_logits_backward(x, t, dloss, dx); };
           }),
  };
}

std::vector<Work> norm_works(const Sizes& s) {
  constexpr double kEps = 1e-5;
  return {
      work(s, "layer_norm_bf16", 4, "^norm_kernel<true, BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix(), w = s.row(), b = s.row();
             const Tensor mean = s.per_row(), rstd = s.per_row();
             return [=] { kernels::layer_norm(x, w, b, kEps, y, mean, rstd); };
           }),
      work(s, "layer_norm_backward_bf16", 6, "^norm_backward_kernel<true, BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), dy = s.matrix(), dx = s.matrix(), w = s.row();
             const Tensor mean = s.per_row(), rstd = s.per_row();
             return [=] { kernels::layer_norm_backward(x, w, mean, rstd, dy, dx, {}, {}, false); };
           }),
      work(s, "layer_norm_parameters_bf16", 4, "^column_sums_kernel<float, NormParameterTerms<BF",
           [s] {
             const Tensor x = s.matrix(), dy = s.matrix(), w = s.row(), dw = s.row(), db = s.row();
             const Tensor mean = s.per_row(), rstd = s.per_row();
             return [=] { kernels::layer_norm_backward(x, w, mean, rstd, dy, {}, dw, db, false); };
           }),
      work(s, "rms_norm_bf16", 4, "^norm_kernel<false, BFloat16, float>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix(), w = s.row(), rstd = s.per_row();
             return [=] { kernels::rms_norm(x, w, kEps, y, rstd); };
           }),
      work(s, "softmax_bf16", 4, "^softmax_kernel<BFloat16>",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix();
             return [=] { kernels::softmax(x, y); };
           }),
      work(s, "softmax_backward_bf16", 6, "^softmax_backward_kernel<BFloat16>",
           [s] {
             const Tensor y = s.matrix(), dy = s.matrix(), dx = s.matrix();
             return [=] { kernels::softmax_backward(y, dy, dx); };
           }),
  };
}

/// Images [N, 64, H, W] of about as many elements; the statistics need a pass of their own.
std::vector<Work> batch_norm_works(const Sizes& s) {
  constexpr std::int64_t kChannels = 64, kSide = 16;
  const Shape shape{s.elements() / (kChannels * kSide * kSide), kChannels, kSide, kSide};
  const auto images = [shape] { return random_channels_last(shape, DType::bf16); };
  const auto channel = [](double value) { return Tensor::full({kChannels}, value); };
  return {
      work(s, "batch_norm_bf16", 6,
           "^(column_sums_kernel<float, DeviationTerms<BF|channel_map_kernel<BFloat16, ChannelNo)",
           [=] {
             const Tensor x = images(), y = images(), w = channel(1), b = channel(0);
             const Tensor mean = channel(0), rstd = channel(1);
             return [=] { kernels::batch_norm(x, w, b, {}, {}, y, mean, rstd, {}); };
           }),
      work(s, "batch_norm_backward_bf16", 10,
           "^(column_sums_kernel<float, BatchNormTerms<BF|channel_map_kernel<BFloat16, BatchNorm)",
           [=] {
             const Tensor x = images(), dy = images(), dx = images(), w = channel(1);
             const Tensor mean = channel(0), rstd = channel(1), dw = channel(0), db = channel(0);
             return [=] { kernels::batch_norm_backward(x, {}, w, mean, rstd, dy, dx, dw, db, {}); };
           }),
  };
}

/// Rows of logits. Rows of GPT-2's 50,257 columns begin at any multiple of 2 bytes, those of 50,304
/// at multiples of 16.
std::vector<Work> loss_works(const Sizes& s, const char* forward, const char* backward) {
  const auto labels = [s] { return integers({s.rows}, s.columns); };
  return {work(s, forward, 2, "^cross_entropy_kernel<BFloat16>",
               [=] {
                 const Tensor x = s.matrix(), t = labels(), loss = s.per_row(), lse = s.per_row();
                 return [=] { kernels::cross_entropy(x, t, loss, lse, {}); };
               }),
          work(s, backward, 4, "^cross_entropy_backward_kernel<BFloat16>", [=] {
            const Tensor x = s.matrix(), t = labels(), dloss = s.per_row(), dx = s.matrix();
            const Tensor lse = Tensor::full({s.rows}, 10.0);
            return [=] { kernels::cross_entropy_backward(x, t, lse, dloss, dx, {}); };
          })};
}

std::vector<Work> table_works(const Sizes& s, std::int64_t vocabulary) {
  const auto index = [=] { return integers({s.rows}, vocabulary); };
  const auto table = [=] { return random({vocabulary, s.columns}, DType::bf16); };
  Work backward =
      work(s, "embedding_backward_bf16", 2, "^embedding_backward_kernel<BFloat16, BF", [=] {
        const Tensor dy = s.matrix(), i = index(), dw = table();
        return [=] { kernels::embedding_backward(dy, i, dw, false); };
      });
  backward.bytes += 2.0 * static_cast<double>(vocabulary * s.columns);
  return {work(s, "embedding_bf16", 4, "^embedding_kernel<BFloat16>",
               [=] {
                 const Tensor w = table(), i = index(), y = s.matrix();
                 return [=] { kernels::embedding(w, i, y); };
               }),
          backward,
          work(s, "sum_of_rows_bf16", 2, "^reduce_rows_kernel<BFloat16>",
               [=] {
                 const Tensor x = s.matrix(), y = Tensor::empty({s.rows, 1});
                 return [=] { kernels::reduce(kernels::ReductionKind::sum, x, y); };
               }),
          work(s, "sum_of_columns_bf16", 2, "^reduce_pack_columns_kernel<BFloat16>", [=] {
            const Tensor x = s.matrix(), y = Tensor::empty({1, s.columns});
            return [=] { kernels::reduce(kernels::ReductionKind::sum, x, y); };
          })};
}

std::vector<Work> list_works(const Sizes& s) {
  return {
      work(s, "check_tensors_bf16", 2, "^check_chunks_kernel<Squares>",
           [s] {
             const Tensor x = s.matrix();
             return [=] { (void)kernels::check_tensors({x}); };
           }),
      work(s, "find_nonfinite_bf16", 2, "^find_nonfinite_kernel",
           [s] {
             const Tensor x = s.matrix(), found = Tensor::zeros({1});
             return [=] { kernels::find_nonfinite({x}, {found}); };
           }),
      work(s, "hash_tensors_bf16", 2, "^hash_chunks_kernel",
           [s] {
             const Tensor x = s.matrix();
             return [=] { kernels::hash_tensors({x}); };
           }),
      work(s, "multi_tensor_scale_bf16_to_f32", 6, "^linear_chunks_kernel",
           [s] {
             const Tensor x = s.matrix(), y = s.matrix(DType::f32);
             return [=] { (void)kernels::multi_tensor_scale({x}, {y}, 0.5); };
           }),
      work(s, "split_master", 8, "^split_master_kernel",
           [s] {
             const Tensor x = s.matrix(DType::f32), w = s.matrix(),
                          rest = Tensor::zeros({s.rows, s.columns}, DType::i16);
             return [=] { kernels::split_master(x, w, rest); };
           }),
      work(s, "join_master", 8, "^map_kernel<JoinMaster",
           [s] {
             const Tensor x = s.matrix(DType::f32), w = s.matrix(),
                          rest = Tensor::zeros({s.rows, s.columns}, DType::i16);
             return [=] { kernels::join_master(w, rest, x); };
           }),
      work(s, "reconcile_master_bf16", 10, "^map_kernel<ReconcileMaster<BFloat16>",
           [s] {
             const Tensor master = s.matrix(DType::f32), w = s.matrix();
             return [=] { kernels::reconcile_master(w, master); };
           }),
  };
}

}  // namespace

std::vector<Work> memory_works(bool tiny) {
  const Sizes matrix = tiny ? Sizes{64, 256} : Sizes{131072, 2048};
  const Sizes logits = tiny ? Sizes{4, 501} : Sizes{8192, 50257};
  const Sizes aligned = tiny ? Sizes{4, 512} : Sizes{8192, 50304};
  std::vector<Work> all;
  for (const auto& group :
       {element_works(matrix), norm_works(matrix), batch_norm_works(matrix),
        loss_works(aligned, "cross_entropy_bf16", "cross_entropy_backward_bf16"),
        loss_works(logits, "cross_entropy_50257_bf16", "cross_entropy_backward_50257_bf16"),
        table_works(matrix, tiny ? 100 : 50257), list_works(matrix)})
    all.insert(all.end(), group.begin(), group.end());
  return all;
}

}  // namespace bench
