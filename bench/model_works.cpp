#include <memory>

#include "cairn/amp/amp.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "support/conv_net.h"
#include "support/gpt.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

/// A model with its optimizer and opt level, ready to step on one fixed batch. bf16 is O1, which is
/// what PyTorch's autocast does.
template <class Model>
struct Training {
  Training(Model m, DType dtype, Tensor inputs, Tensor labels)
      : model(std::move(m)),
        optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 0.01}),
        x(std::move(inputs)),
        target(std::move(labels)),
        precision(amp::initialize(model, optimizer, options(dtype))) {}

  static amp::Options options(DType dtype) {
    if (dtype == DType::f32) return {.opt_level = amp::OptLevel::O0};
    return {.opt_level = amp::OptLevel::O1, .half_dtype = dtype};
  }
  void step() {
    precision.backward(nn::cross_entropy(model(x), target));
    precision.step();
  }

  Model model;
  optim::FusedAdam optimizer;
  Tensor x, target;
  amp::Amp precision;
};

template <class Model>
std::function<void()> steps(Model model, DType dtype, Tensor x, Tensor target) {
  const auto training =
      std::make_shared<Training<Model>>(std::move(model), dtype, std::move(x), std::move(target));
  return [training] { training->step(); };
}

Tensor integers(const Shape& shape, std::int64_t below) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) values.push_back(i * 7919 % below);
  return Tensor::from(values, shape);
}

Work convnet(const char* name, DType dtype) {
  return {name, [dtype] {
            Tensor x = Tensor::empty({100, 1, 28, 28});
            Generator(3).fill_normal(x, 0.0, 1.0);
            return steps(support::conv_net(), dtype, x, integers({100}, 10));
          }};
}

support::Gpt small_gpt() {
  return support::Gpt({.vocabulary = 256, .tokens = 256, .width = 384, .layers = 6, .heads = 6});
}

Work gpt(const char* name, DType dtype) {
  return {name, [dtype] {
            return steps(small_gpt(), dtype, integers({8, 256}, 256), integers({8, 256}, 256));
          }};
}

/// An O2 step of two micro-batches, their gradients summed in f32 or in bf16.
std::function<void()> accumulated_steps(bool f32_sums) {
  struct Accumulated {
    support::Gpt model = small_gpt();
    optim::FusedAdam optimizer{model.parameters(), {.lr = 1e-3, .weight_decay = 0.01}};
    amp::Amp precision = amp::initialize(
        model, optimizer, {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16});
    Tensor x = integers({4, 256}, 256), target = integers({4, 256}, 256);
  };
  const auto training = std::make_shared<Accumulated>();
  for (const auto& arena : training->optimizer.arenas()) arena->accumulate_in_f32(f32_sums);
  return [training] {
    for (int k = 0; k < 2; ++k) {
      training->precision.backward(
          nn::cross_entropy(training->model(training->x), training->target));
    }
    training->precision.step();
  };
}

/// What f32 sums cost: the share of the time that sums in bf16 take.
Work accumulation() {
  return {"gpt_accumulate_2_bf16", [] { return accumulated_steps(true); },
          [] { return accumulated_steps(false); }};
}

}  // namespace

std::vector<Work> model_works() {
  return {convnet("convnet_step_f32", DType::f32), convnet("convnet_step_bf16", DType::bf16),
          gpt("gpt_step_f32", DType::f32), gpt("gpt_step_bf16", DType::bf16), accumulation()};
}

}  // namespace bench
