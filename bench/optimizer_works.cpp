#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
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

struct Parameters {
  std::vector<Tensor> owned;
  std::vector<kernels::UpdateEntry> entries;
  std::vector<TensorView> gradients;

  Tensor make(const Shape& shape, DType dtype, double value) {
    owned.push_back(Tensor::full(shape, value, dtype));
    return owned.back();
  }
};

std::shared_ptr<Parameters> gpt2_parameters(DType half) {
  auto parameters = std::make_shared<Parameters>();
  for (const Shape& shape : gpt2_shapes()) {
    kernels::UpdateEntry entry;
    entry.gradient = parameters->make(shape, half, 0.01);
    entry.weight = parameters->make(shape, half, 0.02);
    if (half != DType::f32) entry.master = parameters->make(shape, DType::f32, 0.02);
    entry.moment1 = parameters->make(shape, DType::f32, 0.0);
    entry.moment2 = parameters->make(shape, DType::f32, 0.0);
    parameters->entries.push_back(entry);
    parameters->gradients.push_back(entry.gradient);
  }
  return parameters;
}

std::function<void()> adamw() {
  const auto parameters = gpt2_parameters(DType::f32);
  return [parameters] { kernels::adam_update(parameters->entries, {.weight_decay = 0.01}); };
}

std::function<void()> o2_update() {
  const auto parameters = gpt2_parameters(DType::bf16);
  return [parameters] {
    const kernels::GradientCheck check = kernels::check_gradients(parameters->gradients);
    const double clip = 1.0 / (check.squared_norm + 1e-6);
    kernels::adam_update(parameters->entries,
                         {.weight_decay = 0.01, .gradient_scale = clip / 1024.0});
  };
}

}  // namespace

std::vector<Work> optimizer_works() {
  return {{"adamw_124m_f32", adamw}, {"o2_update_124m_bf16", o2_update}};
}

}  // namespace bench
