// Every own kernel gives the same bits whatever the order of threads and blocks (a missing barrier,
// blocks that depend on each other and unordered sums would not), at sizes that leave tails, on
// addresses that packs cannot use. What the values should be is tests/kernels' business.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cairn/kernels/attention.h"
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/ctc.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/embedding.h"
#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/layer_norm.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/kernels/pool.h"
#include "cairn/kernels/resample.h"
#include "cairn/kernels/softmax.h"
#include "cairn/kernels/sort_scan.h"
#include "gpu/sim/simulator.h"
#include "simt/emulator.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using simt::Order;
const Device kGpu{DeviceType::cuda, 0};
using Tensors = std::vector<Tensor>;

/// Random values; its address is `shift` elements past an aligned one.
Tensor random(const Shape& shape, DType dtype, std::uint64_t seed, std::int64_t shift = 0) {
  const Tensor values = test::random_tensor(shape, dtype, kGpu, seed);
  const Tensor room = Tensor::zeros({shape.numel() + shift}, dtype);
  const Tensor moved = room.alias(room.view().slice(0, shift, room.numel()).reshape(shape));
  copy(values, moved);
  return moved;
}

Tensor images(const Shape& shape, DType dtype, std::uint64_t seed) {
  return test::random_channels_last(shape, dtype, kGpu, seed);
}

Tensor indices(std::int64_t count, std::int64_t limit, std::uint64_t seed) {
  std::vector<std::int64_t> values;
  for (double v : test::random_values(count, seed, 0.0, static_cast<double>(limit))) {
    values.push_back(static_cast<std::int64_t>(v));
  }
  return Tensor::from(values, {count});
}

Tensors elementwise(DType dtype) {
  Tensors results;
  for (std::int64_t shift : {0, 1}) {
    const Shape shape{5, 7, 61};
    const Tensor a = random(shape, dtype, 1, shift), b = random(shape, dtype, 2);
    const Tensor column = random({5, 1, 61}, dtype, 3);
    for (UnaryOp op : {UnaryOp::relu, UnaryOp::gelu, UnaryOp::exp}) {
      results.push_back(random(shape, dtype, 4, shift));
      unary(op, a, results.back());
      results.push_back(random(shape, dtype, 4));
      unary_backward(op, a, b, results.back());
    }
    results.push_back(random(shape, dtype, 5));
    binary(BinaryOp::mul, a, column, results.back());
    results.push_back(random({61, 7, 5}, dtype, 6));
    copy(a.view().permute({2, 1, 0}), results.back());
    results.push_back(random(shape, DType::f32, 7));
    axpby(2.0, a, -1.0, results.back());
    results.push_back(random(shape, dtype, 8, shift));
    dropout(a, 0.3, 11, 5, results.back());
  }
  return results;
}

Tensors reductions(DType dtype) {
  Tensors results;
  const Tensor wide = random({3, 5003}, dtype, 1, 1), tall = random({3001, 37}, dtype, 2);
  const Tensor cube = random({9, 11, 13}, dtype, 3);
  for (ReductionKind op : {ReductionKind::sum, ReductionKind::mean, ReductionKind::max}) {
    for (const auto& [x, shape] :
         {std::pair{wide, Shape{3, 1}}, std::pair{wide, Shape{1, 1}}, std::pair{tall, Shape{1, 37}},
          std::pair{cube, Shape{9, 1, 13}}, std::pair{cube, Shape{1, 11, 1}}}) {
      results.push_back(Tensor::full(shape, 1.0, DType::f32));
      reduce(op, x, results.back(), op != ReductionKind::max);
    }
  }
  return results;
}

Tensors softmaxes(DType dtype) {
  Tensors results;
  for (std::int64_t columns : {1, 33, 1100}) {
    for (const SoftmaxOptions& options :
         {SoftmaxOptions{}, SoftmaxOptions{true, false, 0.5}, SoftmaxOptions{false, true, 1.0}}) {
      const Tensor x = random({2, 3, columns}, dtype, 1, 1), dy = random({2, 3, columns}, dtype, 2);
      results.push_back(random({2, 3, columns}, dtype, 3));
      softmax(x, results.back(), options);
      results.push_back(random({2, 3, columns}, dtype, 4));
      softmax_backward(results[results.size() - 2], dy, results.back(), options);
    }
  }
  return results;
}

/// A head size for each padding; the first three lie in registers otherwise than the last.
Tensors attentions(DType dtype) {
  Tensors results;
  for (const std::int64_t D : {8, 40, 72, 200}) {
    const Shape queries{1, 2, 150, D}, keys{1, D == 40 ? 1 : 2, 90, D};
    const AttentionOptions options{
        .causal = D != 40, .scale = 0.3, .dropout = D == 72 ? 0.2 : 0.0, .draw = {1, 2}};
    const Tensor q = random(queries, dtype, 1), k = random(keys, dtype, 2, 1),
                 v = random(keys, dtype, 3), dy = random(queries, dtype, 4);
    const Tensor y = random(queries, dtype, 5), lse = random({1, 2, 150}, DType::f32, 6);
    const Tensor dq = random(queries, dtype, 7), dk = random(keys, dtype, 8),
                 dv = random(keys, dtype, 9);
    attention(q, k, v, y, lse, options);
    attention_backward(q, k, v, y, lse, dy, dq, dk, dv, options);
    results.insert(results.end(), {y, lse, dq, dk, dv});
  }
  return results;
}

Tensors cross_entropies(DType dtype) {
  const std::int64_t rows = 9, classes = 1037;
  const Tensor x = random({rows, classes}, dtype, 1), target = indices(rows, classes, 2);
  const Tensor dloss = random({rows}, DType::f32, 3);
  Tensors results{random({rows}, DType::f32, 4), random({rows}, DType::f32, 5),
                  random({rows, classes}, dtype, 6)};
  cross_entropy(x, target, results[0], results[1], {-100, 0.1});
  cross_entropy_backward(x, target, results[1], dloss, results[2], {-100, 0.1});
  return results;
}

Tensors losses(DType dtype) {
  const Tensor x = random({131}, dtype, 1, 1), target = random({131}, dtype, 2);
  const Tensor dloss = random({131}, DType::f32, 3);
  Tensors results{random({131}, DType::f32, 4), random({131}, dtype, 5),
                  random({131}, DType::f32, 6), random({131}, dtype, 7),
                  random({131}, DType::f32, 8), random({131}, dtype, 9)};
  mse(x, target, results[0]);
  mse_backward(x, target, dloss, results[1]);
  bce_with_logits(x, target, results[2]);
  bce_with_logits_backward(x, target, dloss, results[3]);
  bce(x, target, results[4]);
  bce_backward(x, target, dloss, results[5]);
  return results;
}

Tensors row_norms(DType dtype) {
  Tensors results;
  for (const Shape& shape : {Shape{6, 33}, Shape{300, 72}, Shape{2, 2100}}) {
    const std::int64_t n = shape[0], d = shape[1];
    const Tensor x = random(shape, dtype, 1, 1), dy = random(shape, dtype, 2);
    const Tensor weight = random({d}, DType::f32, 3), bias = random({d}, dtype, 4);
    const Tensor y = random(shape, dtype, 5), dx = random(shape, dtype, 6);
    const Tensor mean = random({n}, DType::f32, 7), rstd = random({n}, DType::f32, 8);
    const Tensor dweight = random({d}, DType::f32, 9), dbias = random({d}, dtype, 10);
    layer_norm(x, weight, bias, 1e-5, y, mean, rstd);
    layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, true);
    results.insert(results.end(), {y, mean, rstd, dx, dweight, dbias});
    const Tensor z = random(shape, dtype, 11), dz = random(shape, dtype, 12);
    const Tensor scale = random({n}, DType::f32, 13), dscale = random({d}, DType::f32, 14);
    rms_norm(x, weight, 1e-5, z, scale);
    rms_norm_backward(x, weight, scale, dy, dz, dscale, false);
    results.insert(results.end(), {z, scale, dz, dscale});
  }
  return results;
}

Tensors batch_norms(DType dtype) {
  Tensors results;
  for (const Shape& shape : {Shape{700, 5}, Shape{3, 37, 9, 5}}) {
    const bool image = shape.dims() == 4;
    const auto make = [&](std::uint64_t seed) {
      return image ? images(shape, dtype, seed) : random(shape, dtype, seed, 1);
    };
    const std::int64_t c = shape[1];
    const Tensor x = make(1), dy = make(2), y = make(3), dx = make(4);
    const Tensor weight = random({c}, DType::f32, 5), bias = random({c}, DType::f32, 6);
    const Tensor running_mean = random({c}, DType::f32, 7);
    const Tensor running_var = Tensor::full({c}, 1.0, DType::f32);
    const Tensor mean = random({c}, DType::f32, 8), rstd = random({c}, DType::f32, 9);
    const Tensor dweight = random({c}, DType::f32, 10), dbias = random({c}, DType::f32, 11);
    batch_norm(x, weight, bias, running_mean, running_var, y, mean, rstd, {.relu = true});
    batch_norm_backward(x, y, weight, mean, rstd, dy, dx, dweight, dbias, {.relu = true}, true);
    const Tensor z = make(12);
    batch_norm_eval(x, weight, bias, running_mean, running_var, z, {});
    const Tensor parts = random({2, 2 * c + 1}, DType::f32, 13),
                 count = random({1}, DType::f32, 14);
    const Tensor var = random({c}, DType::f32, 15), dz = make(16);
    batch_norm_moments(x, parts.view().select(0, 0));
    batch_norm_moments(dy, parts.view().select(0, 1));
    batch_norm_merge(parts, running_mean, running_var, mean, var, rstd, count, {});
    batch_norm_backward_data(x, y, weight, mean, rstd, dy, bias, weight, dz, {.relu = true});
    results.insert(results.end(), {y, mean, rstd, running_mean, running_var, dx, dweight, dbias, z,
                                   parts, var, count, dz});
  }
  return results;
}

Tensors pools(DType dtype) {
  Tensors results;
  const Pool2dOptions options{{3, 2}, {2, 1}, {1, 1}};
  for (const bool channels_last : {true, false}) {
    const Shape shape{2, 5, 9, 7}, small = pool2d_shape(shape, options);
    const auto make = [&](const Shape& s, std::uint64_t seed) {
      return channels_last ? images(s, dtype, seed) : random(s, dtype, seed);
    };
    const Tensor x = make(shape, 1), dy = make(small, 2), y = make(small, 3), dx = make(shape, 4);
    const Tensor index = Tensor::empty_strided(small, y.strides(), DType::i32, kGpu);
    max_pool2d(x, y, index, options);
    max_pool2d_backward(dy, index, dx, options);
    const Tensor mean = make(small, 5), dmean = make(shape, 6);
    avg_pool2d(x, mean, options);
    avg_pool2d_backward(dy, dmean, options);
    results.insert(results.end(), {y, index, dx, mean, dmean});
    const Shape other{2, 5, 4, 11};
    const Tensor z = make(other, 7), dz = make(shape, 8), most = make(other, 9);
    resample2d(x, z, {ResampleMode::bilinear});
    resample2d_backward(z, dz, {ResampleMode::area});
    const Tensor winner = Tensor::empty_strided(other, most.strides(), DType::i32, kGpu);
    max_pool2d(x, most, winner, {.output = {{4, 11}}});
    results.insert(results.end(), {z, dz, most, winner});
  }
  return results;
}

Tensors along_rows(DType dtype) {
  const Tensor x = random({5, 700}, dtype, 1, 1), y = random({5, 700}, dtype, 2);
  const Tensor index = Tensor::empty({5, 9}, DType::i64);
  topk(x, index);
  cumsum(x, y, true);
  return {index, y};
}

Tensors ctc_losses(DType dtype) {
  const DType wide = dtype == DType::f64 ? dtype : DType::f32;
  const Tensor x = random({6, 3, 5}, wide, 1, 1), dx = random({6, 3, 5}, wide, 2);
  const Tensor targets = indices(12, 4, 3), steps = Tensor::full({3}, 6, DType::i64),
               lengths = Tensor::full({3}, 2, DType::i64);
  const Tensor loss = random({3}, wide, 4), alpha = Tensor::zeros({3, 6, 9}, wide);
  const CtcTargets all{targets.view().reshape({3, 4}), steps, lengths, 4};
  ctc_loss(x, all, loss, alpha);
  ctc_loss_backward(x, all, loss, alpha, loss, dx);
  return {loss, dx};
}

Tensors embeddings(DType dtype) {
  const std::int64_t rows = 700, vocabulary = 1500, columns = 19;
  const Tensor weight = random({vocabulary, columns}, dtype, 1),
               dy = random({rows, columns}, dtype, 2);
  Tensors results{random({rows, columns}, dtype, 3), random({vocabulary, columns}, DType::f32, 4),
                  random({vocabulary, columns}, dtype, 5)};
  const Tensor few = indices(rows, 9, 6), many = indices(rows, vocabulary, 7);
  embedding(weight, many, results[0]);
  embedding_backward(dy, few, results[1], true);
  embedding_backward(dy, many, results[2], false);
  return results;
}

Tensors updates(DType dtype) {
  Tensors results;
  std::vector<UpdateEntry> adam, sgd;
  std::vector<TensorView> gradients;
  for (std::int64_t count : {1, 0, 37, 16384, 40001}) {
    const auto seed = static_cast<std::uint64_t>(count);
    const auto state = [&](std::uint64_t k) {
      const Tensor made = random({count}, DType::f32, seed + k, count % 2);
      unary(UnaryOp::square, made, made);
      results.push_back(made);
      return made;
    };
    const auto weight = [&](std::uint64_t k) {
      results.push_back(random({count}, dtype, seed + k));
      return results.back();
    };
    results.push_back(random({count}, dtype, seed, 1));
    const TensorView gradient = results.back();
    gradients.push_back(gradient);
    adam.push_back({gradient, weight(1), state(2), state(3), state(4)});
    sgd.push_back({gradient, weight(5), state(6), state(7), {}});
  }
  update(adam, AdamOptions{.weight_decay = 0.1, .gradient_scale = 0.5});
  update(sgd, SgdOptions{.momentum = 0.9, .nesterov = true});
  fill(gradients[3].slice(0, 5, 9), std::numeric_limits<double>::infinity());
  std::vector<double> norms;
  for (double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    const std::vector<TensorCheck> checks = check_tensors(gradients, p).read();
    EXPECT_EQ(checks[3].nonfinite, 4);
    for (const TensorCheck& check : checks) norms.push_back(check.power_sum);
  }
  for (std::uint64_t hash : hash_tensors(gradients)) {
    norms.push_back(static_cast<double>(hash >> 11));  // f64 has 53 bits
  }
  std::vector<TensorView> sums;
  for (const TensorView& gradient : gradients) {
    results.push_back(Tensor::full(gradient.shape, 1.0, DType::f32));
    sums.push_back(results.back());
  }
  multi_tensor_axpby(0.5, gradients, 2.0, sums, sums).read();
  multi_tensor_scale(sums, sums, 3.0).read();
  results.push_back(Tensor::from(norms, {static_cast<std::int64_t>(norms.size())}));
  return results;
}

/// LAMB (in one call and in two) and NovoGrad, with remainders beside bf16 weights and scalars for
/// each entry.
Tensors layerwise_updates(DType dtype) {
  Tensors results;
  std::vector<UpdateEntry> lamb, novograd;
  for (std::int64_t count : {1, 0, 37, 16384, 40001}) {
    const auto seed = static_cast<std::uint64_t>(count);
    const auto keep = [&](const Tensor& made) -> TensorView {
      results.push_back(made);
      return made;
    };
    const auto entry = [&](std::uint64_t k) {
      const TensorView weight = keep(random({count}, dtype, seed + k, 1));
      const DType kept = dtype == DType::bf16 ? DType::i16 : DType::f32;
      UpdateEntry e{keep(random({count}, dtype, seed + k + 1)), weight,
                    keep(Tensor::full({count}, 1, kept)),
                    keep(Tensor::full({count}, 0.5, DType::bf16)),
                    keep(Tensor::full({count}, 0.5, DType::bf16))};
      e.gradient_factor = 1.0 + 0.1 * static_cast<double>(count % 7);
      e.norm = 0.5;
      return e;
    };
    lamb.push_back(entry(1));
    novograd.push_back(entry(3));
  }
  update(lamb, LambOptions{.weight_decay = 0.1});
  std::vector<LambNorms> norms;
  std::vector<double> found;
  const std::vector<TensorCheck> checks = begin_lamb_update(lamb, LambOptions{}).read();
  for (std::size_t i = 0; i < lamb.size(); ++i) {
    norms.push_back({checks[2 * i].power_sum, checks[2 * i + 1].power_sum});
    found.insert(found.end(), {norms.back().weight, norms.back().update});
  }
  end_lamb_update(lamb, norms, LambOptions{});
  results.push_back(Tensor::from(found, {std::ssize(found)}));
  update(novograd, NovoGradOptions{.weight_decay = 0.1, .reg_inside_moment = true});
  return results;
}

/// Masters of which every third weight was written.
Tensors masters(DType dtype) {
  const DType half = core::is_half(dtype) ? dtype : DType::bf16;
  Tensors results;
  for (std::int64_t count : {1, 0, 37, 40001}) {
    const Tensor master = random({count}, DType::f32, 1, 1), weight = random({count}, half, 2, 1);
    copy(master, weight);
    for (std::int64_t i = 0; i < count; i += 3) fill(weight.view().slice(0, i, i + 1), 0.5);
    reconcile_master(weight, master);
    results.push_back(master);
  }
  return results;
}

struct Case {
  const char* name;
  std::function<Tensors(DType)> run;
  DType dtype;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name << " " << core::name(c.dtype);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto& [name, run] :
         std::initializer_list<std::pair<const char*, Tensors (*)(DType)>>{
             {"elementwise", elementwise},
             {"reduce", reductions},
             {"softmax", softmaxes},
             {"attention", attentions},
             {"cross_entropy", cross_entropies},
             {"losses", losses},
             {"row_norms", row_norms},
             {"batch_norm", batch_norms},
             {"pool", pools},
             {"along_rows", along_rows},
             {"ctc", ctc_losses},
             {"embedding", embeddings},
             {"multi_tensor", updates},
             {"layerwise_updates", layerwise_updates},
             {"masters", masters}}) {
      all.push_back({name, run, dtype});
    }
  }
  return all;
}

std::string bytes_of(const Tensor& tensor) {
  const Tensor dense = Tensor::empty(tensor.shape(), tensor.dtype(), {});
  copy(tensor, dense);
  return {static_cast<const char*>(dense.raw_data()), dense.nbytes()};
}

class Orders : public testing::TestWithParam<Case> {
 protected:
  Orders() { gpusim::set_schedule(gpusim::Schedule::early, 1); }  // kernels run in this thread
  ~Orders() override { simt::schedule() = {}; }

 private:
  core::DefaultDeviceGuard gpu_{kGpu};
};

TEST_P(Orders, GiveTheSameBits) {
  const std::uint64_t launches = simt::launch_count();
  const Tensors expected = GetParam().run(GetParam().dtype);
  EXPECT_GT(simt::launch_count(), launches);
  for (const simt::Schedule& schedule :
       {simt::Schedule{Order::reverse}, simt::Schedule{Order::shuffled, 3}}) {
    simt::schedule() = schedule;
    const Tensors actual = GetParam().run(GetParam().dtype);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t k = 0; k < actual.size(); ++k) {
      EXPECT_EQ(bytes_of(actual[k]) == bytes_of(expected[k]), true)
          << "result " << k << " of shape " << actual[k].shape() << " depends on the order";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Orders, testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(info.param.name) + "_" + std::string(core::name(info.param.dtype));
});

}  // namespace
}  // namespace cairn::kernels
