// ctc_loss.
#include "cairn/kernels/ctc.h"

#include <limits>

#include "cairn/autograd/ops.h"
#include "ops/common.h"

namespace cairn::autograd {

namespace {

// One loss a sequence, in f32 (f64).
struct Ctc {
  static constexpr OpInfo kInfo{"ctc_loss", CastPolicy::f32};
  std::int64_t blank;

  Tensor forward(Context& ctx, const Tensor& given, const Tensor& targets,
                 const Tensor& input_lengths, const Tensor& target_lengths) {
    check(given, targets, input_lengths, target_lengths);
    const Tensor log_probs = contiguous_data(given), labels = contiguous_data(targets);
    const std::int64_t T = given.size(0), N = given.size(1);
    Tensor loss = empty_as(given, {N}, given.dtype());
    const Tensor alpha = empty_as(given, {N, T, 2 * targets.size(1) + 1}, given.dtype());
    kernels::ctc_loss(log_probs, {labels, input_lengths, target_lengths, blank}, loss, alpha);
    for (const Tensor& saved : {log_probs, labels, input_lengths, target_lengths, loss, alpha}) {
      ctx.save(saved);
    }
    return loss;
  }
  Tensors backward(Context& ctx, const Tensor& dy) {
    const Tensor log_probs = ctx.saved(0), labels = ctx.saved(1);
    const Tensor input_lengths = ctx.saved(2), target_lengths = ctx.saved(3);
    const Tensor dx = Tensor::empty_like(log_probs);
    kernels::ctc_loss_backward(log_probs, {labels, input_lengths, target_lengths, blank},
                               ctx.saved(4), ctx.saved(5), contiguous_data(dy), dx);
    return {dx, {}, {}, {}};
  }

 private:
  static void check(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                    const Tensor& target_lengths) {
    const bool all = targets.defined() && input_lengths.defined() && target_lengths.defined();
    CAIRN_CHECK(all && log_probs.dims() == 3 && targets.dims() == 2, kInfo.name,
                "expected log_probs [T, N, C], targets [N, S] and lengths [N], got ",
                log_probs.shape(), " and ", all ? core::str(targets.shape()) : "none");
  }
};

}  // namespace

Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, const CtcOptions& options) {
  Tensor losses = apply(Ctc{options.blank}, to(log_probs, wide(log_probs.dtype())), targets,
                        input_lengths, target_lengths);
  const auto constant = [&](double value) {
    return Tensor::full({}, value, losses.dtype(), losses.device());
  };
  if (options.zero_infinity) {
    const Tensor impossible = eq(losses, constant(std::numeric_limits<double>::infinity()));
    losses = where(impossible, constant(0.0), losses);
  }
  if (options.reduction == Reduction::none) return losses;
  if (options.reduction == Reduction::sum) return sum(losses);
  check_mean(Ctc::kInfo.name, options.reduction, losses.numel(), log_probs.shape());
  const double most = std::numeric_limits<double>::infinity();
  return mean(losses / clamp(to(target_lengths, losses.dtype()), 1.0, most));
}

}  // namespace cairn::autograd
