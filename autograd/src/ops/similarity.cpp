// cosine_similarity, cosine_embedding_loss, triplet_margin_loss, bilinear: made of other
// operations.
#include <cmath>
#include <limits>

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

namespace {

constexpr OpInfo kCosineSimilarity{"cosine_similarity", CastPolicy::f32},
    kCosineEmbeddingLoss{"cosine_embedding_loss", CastPolicy::f32},
    kTripletMarginLoss{"triplet_margin_loss", CastPolicy::f32},
    kBilinear{"bilinear", CastPolicy::promote};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor widened(const Tensor& x) {
  return to(x, wide(x.dtype()));
}

Tensor reduced_loss(const char* op, const Tensor& losses, Reduction reduction) {
  if (reduction == Reduction::none) return losses;
  check_mean(op, reduction, losses.numel(), losses.shape());
  return reduction == Reduction::mean ? mean(losses) : sum(losses);
}

void check_alike(const OpInfo& info, const Tensor& a, const Tensor& b) {
  CAIRN_CHECK(b.defined() && a.shape() == b.shape() && a.dims() > 0, info.name,
              "expected inputs of one shape [..., D], got ", a.shape(), " and ",
              b.defined() ? core::str(b.shape()) : "none");
}

Tensor squared_norm(const Tensor& x, int dim) {
  return sum(x * x, {dim});
}

// Where target is value; 0 elsewhere.
Tensor where_target_is(double value, const Tensor& target, const Tensor& losses) {
  const Tensor wanted = Tensor::full({}, value, target.dtype(), target.device());
  return where(eq(target, wanted), losses, Tensor::zeros({}, losses.dtype(), losses.device()));
}

Tensor distance(const Tensor& a, const Tensor& b, const TripletOptions& options) {
  const Tensor difference = a - b + options.eps;
  if (options.p != 2.0) {
    return pow(sum(pow(abs(difference), options.p), {-1}), 1.0 / options.p);
  }
  const double tiny = std::numeric_limits<float>::min();  // the root has no slope at 0
  return sqrt(clamp(squared_norm(difference, -1), tiny, kInfinity));
}

}  // namespace

Tensor cosine_similarity(const Tensor& a, const Tensor& b, int dim, double eps) {
  check_alike(kCosineSimilarity, a, b);
  const auto norm = [&](const Tensor& x) {
    return sqrt(clamp(squared_norm(x, dim), eps * eps, kInfinity));
  };
  return composed<kCosineSimilarity>(
      [&](const Tensor& x, const Tensor& y) { return sum(x * y, {dim}) / (norm(x) * norm(y)); }, a,
      b);
}

Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& target,
                             Reduction reduction, double margin) {
  check_alike(kCosineEmbeddingLoss, a, b);
  const Shape rows(a.shape().begin(), a.shape().end() - 1);
  CAIRN_CHECK(target.defined() && target.shape() == rows, kCosineEmbeddingLoss.name,
              "expected a target ", rows, " of 1 and -1, got ",
              target.defined() ? core::str(target.shape()) : "none");
  constexpr double kEps = 1e-12;  // of the squared norms, as PyTorch's
  return composed<kCosineEmbeddingLoss>(
      [&](const Tensor& given_a, const Tensor& given_b) {
        const Tensor x = widened(given_a), y = widened(given_b);
        const Tensor norms = (squared_norm(x, -1) + kEps) * (squared_norm(y, -1) + kEps);
        const Tensor cosine = sum(x * y, {-1}) / sqrt(norms);
        const Tensor apart = clamp(cosine - margin, 0.0, kInfinity);
        return reduced_loss(kCosineEmbeddingLoss.name,
                            where_target_is(1.0, target, affine(cosine, -1.0, 1.0)) +
                                where_target_is(-1.0, target, apart),
                            reduction);
      },
      a, b);
}

Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& options) {
  check_alike(kTripletMarginLoss, anchor, positive);
  check_alike(kTripletMarginLoss, anchor, negative);
  CAIRN_CHECK(options.p > 0.0, kTripletMarginLoss.name, "expected p > 0, got ", options.p);
  return composed<kTripletMarginLoss>(
      [&](const Tensor& given_a, const Tensor& given_p, const Tensor& given_n) {
        const Tensor a = widened(given_a), p = widened(given_p), n = widened(given_n);
        const Tensor near = distance(a, p, options);
        Tensor far = distance(a, n, options);
        if (options.swap) far = minimum(far, distance(p, n, options));
        return reduced_loss(kTripletMarginLoss.name,
                            clamp(near - far + options.margin, 0.0, kInfinity), options.reduction);
      },
      anchor, positive, negative);
}

Tensor bilinear(const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias) {
  const bool fits = b.defined() && weight.defined() && weight.dims() == 3 && a.dims() >= 1 &&
                    a.dims() == b.dims() && a.size(-1) == weight.size(1) &&
                    b.size(-1) == weight.size(2);
  CAIRN_CHECK(fits, kBilinear.name, "expected a [..., I], b [..., J] and weight [O, I, J], got ",
              a.shape(), ", ", b.defined() ? core::str(b.shape()) : "none", " and ",
              weight.defined() ? core::str(weight.shape()) : "none");
  const std::int64_t O = weight.size(0), I = weight.size(1), J = weight.size(2);
  Shape shape = a.shape();
  shape[a.dims() - 1] = O;
  return composed<kBilinear>(
      [&](const Tensor& x, const Tensor& y, const Tensor& w, const Tensor& shift) {
        const Tensor by_y = linear(reshape(y, {-1, J}), reshape(w, {O * I, J}));
        const Tensor z = matmul(reshape(by_y, {-1, O, I}), reshape(x, {-1, I, 1}));
        const Tensor result = reshape(z, shape);
        return shift.defined() ? result + shift : result;
      },
      a, b, weight, bias);
}

}  // namespace cairn::autograd
