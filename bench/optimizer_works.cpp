#include <memory>
#include <string>

#include "cairn/amp/amp.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/optimizer.h"
#include "memory_loops.h"
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

std::int64_t gpt2_parameters() {
  std::int64_t count = 0;
  for (const Shape& shape : gpt2_shapes()) count += shape.numel();
  return count;
}

std::function<std::function<void()>()> loop(Bytes bytes) {
  return [bytes] { return memory_loop(bytes, gpt2_parameters()); };
}

/// The optimizer as a trainer has it: gradients in its arena, written once and kept.
struct Training {
  explicit Training(DType dtype, const optim::StateOptions& state = {})
      : optimizer(parameters(dtype), {.weight_decay = 0.01}) {
    optimizer.set_state_options(state);
    for (const auto& arena : optimizer.arenas()) {
      for (const auto& buffer : arena->buffers()) {
        kernels::fill(buffer.data, 0.01);
        for (const auto& slot : buffer.slots) {
          arena->parameters()[slot.parameter].tensor.gradient_slot().mark_written();
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

std::function<void()> o2_update(const optim::StateOptions& state) {
  const auto training = std::make_shared<Training>(DType::bf16, state);
  return [training] {
    training->optimizer.step(
        {.gradient_scale = 1.0 / 1024, .max_gradient_norm = 1.0, .keep_gradients = true});
  };
}

/// The same update under a dynamic loss scale, with all that amp's step does beside it.
std::function<void()> amp_step() {
  const auto training = std::make_shared<Training>(DType::bf16);
  const auto precision =
      std::make_shared<amp::Amp>(amp::initialize(std::vector<nn::Module*>{}, {&training->optimizer},
                                                 {.opt_level = amp::OptLevel::O2,
                                                  .half_dtype = DType::bf16,
                                                  .dynamic_loss_scale = true,
                                                  .scaler = {.init_scale = 1024},
                                                  .max_gradient_norm = 1.0}));
  return [training, precision] { precision->step({.keep_gradients = true}); };
}

/// A list of bf16 weights with f32 masters and f32 moments.
struct List {
  explicit List(int moments) {
    for (const Shape& shape : gpt2_shapes()) {
      kernels::UpdateEntry e{tensor(shape, 0.01, DType::bf16), tensor(shape, 0.02, DType::bf16),
                             tensor(shape, 0.02, DType::f32), tensor(shape, 0.001, DType::f32)};
      if (moments > 1) e.moment2 = tensor(shape, 0.001, DType::f32);
      e.norm = 1.0;
      entries.push_back(e);
    }
  }
  TensorView tensor(const Shape& shape, double value, DType dtype) {
    memory.push_back(Tensor::full(shape, value, dtype));
    return memory.back();
  }

  std::vector<Tensor> memory;
  std::vector<kernels::UpdateEntry> entries;
};

template <class Options>
std::function<void()> update() {
  constexpr Options options{.weight_decay = 0.01};
  const auto list = std::make_shared<List>(options.moments());
  return [=] { kernels::update(list->entries, options); };
}

}  // namespace

std::vector<Work> optimizer_works() {
  const auto o2 = [](const optim::StateOptions& state) { return [=] { return o2_update(state); }; };
  const optim::StateOptions compact{.moments = DType::bf16,
                                    .masters = optim::MasterStorage::remainder};
  return {
      {"adamw_124m_f32", adamw, loop(Bytes::adamw_f32)},
      {"o2_update_124m_bf16", o2({}), loop(Bytes::o2)},
      {"o2_update_124m_compact", o2(compact), loop(Bytes::o2_compact)},
      {"amp_step_124m_bf16", amp_step, o2({})},  // its share: of the update without a scaler
      {"lamb_update_124m", update<kernels::LambOptions>, loop(Bytes::lamb)},
      {"novograd_update_124m", update<kernels::NovoGradOptions>, loop(Bytes::one_moment)},
      {"adagrad_update_124m", update<kernels::AdagradOptions>, loop(Bytes::one_moment)},
  };
}

}  // namespace bench
