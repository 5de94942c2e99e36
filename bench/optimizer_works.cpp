#include <memory>
#include <string>

#include "cairn/kernels/elementwise.h"
#include "cairn/optim/optimizer.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

/// GPT-2 small's 148 tensors, 124M parameters.
std::vector<Shape> gpt2_shapes() {
  constexpr std::int64_t d = 768;
  std::vector<Shape> shapes{{50257, d}, {1024, d}};
  for (int block = 0; block < 12; ++block) {
    for (const Shape& shape :
         {Shape{d}, Shape{d}, Shape{3 * d, d}, Shape{3 * d}, Shape{d, d}, Shape{d}, Shape{d},
          Shape{d}, Shape{4 * d, d}, Shape{4 * d}, Shape{d, 4 * d}, Shape{d}}) {
      shapes.push_back(shape);
    }
  }
  shapes.insert(shapes.end(), {Shape{d}, Shape{d}});
  return shapes;
}

/// The optimizer as a trainer has it: gradients in its arena, written once and kept.
struct Training {
  explicit Training(DType dtype) : optimizer(parameters(dtype), {.weight_decay = 0.01}) {
    for (const auto& arena : optimizer.arenas()) {
      for (const auto& buffer : arena->buffers()) {
        kernels::fill(buffer.data, 0.01);
        for (const auto& slot : buffer.slots) {
          arena->parameters()[slot.parameter].tensor.meta().grad_written = true;
        }
      }
    }
  }

  static NamedTensors parameters(DType dtype) {
    NamedTensors all;
    for (const Shape& shape : gpt2_shapes()) {
      Tensor weight = Tensor::full(shape, 0.02, dtype);
      all.push_back({std::to_string(all.size()), weight.set_requires_grad(true)});
    }
    return all;
  }

  optim::FusedAdam optimizer;
};

std::function<void()> adamw() {
  const auto training = std::make_shared<Training>(DType::f32);
  return [training] { training->optimizer.step({.check = false, .keep_gradients = true}); };
}

std::function<void()> o2_update() {
  const auto training = std::make_shared<Training>(DType::bf16);
  return [training] {
    training->optimizer.step(
        {.gradient_scale = 1.0 / 1024, .max_gradient_norm = 1.0, .keep_gradients = true});
  };
}

}  // namespace

std::vector<Work> optimizer_works() {
  return {{"adamw_124m_f32", adamw}, {"o2_update_124m_bf16", o2_update}};
}

}  // namespace bench
