#include <filesystem>
#include <memory>
#include <string>

#include "cairn/amp/amp.h"
#include "cairn/kernels/copy.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/optimizer.h"
#include "memory_loops.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

/// A GPT-2: its tensors' shapes, the output layer being the embedding.
struct Gpt2 {
  std::int64_t layers, width, vocabulary = 50257, tokens = 1024;

  std::vector<Shape> shapes() const {
    const std::int64_t d = width;
    std::vector<Shape> shapes{{vocabulary, d}, {tokens, d}};
    for (std::int64_t block = 0; block < layers; ++block) {
      for (const Shape& shape :
           {Shape{d}, Shape{d}, Shape{3 * d, d}, Shape{3 * d}, Shape{d, d}, Shape{d}, Shape{d},
            Shape{d}, Shape{4 * d, d}, Shape{4 * d}, Shape{d, 4 * d}, Shape{d}}) {
        shapes.push_back(shape);
      }
    }
    shapes.insert(shapes.end(), {Shape{d}, Shape{d}});
    return shapes;
  }
  std::int64_t parameters() const {
    std::int64_t count = 0;
    for (const Shape& shape : shapes()) count += shape.numel();
    return count;
  }
};
constexpr Gpt2 kSmall{12, 768};   // 124M parameters in 148 tensors
constexpr Gpt2 kLarge{48, 1600};  // 1.56G in 580
constexpr Gpt2 kTiny{1, 16, 64, 8};

/// The optimizer as a trainer has it: gradients in its arena, written once and kept.
struct Training {
  Training(const Gpt2& model, DType dtype, const optim::StateOptions& state = {})
      : optimizer(parameters(model, dtype), {.weight_decay = 0.01}) {
    optimizer.set_state_options(state);
    const Tensor& first = optimizer.groups().front().parameters.front().tensor;
    const auto arena = optim::GradientArena::of(first);
    for (const auto& buffer : arena->buffers()) {
      kernels::copy(random(buffer.data.shape(), buffer.data.dtype()), buffer.data);
      for (const auto& slot : buffer.slots) {
        arena->parameters()[slot.parameter].tensor.gradient_slot().mark_written();
      }
    }
  }

  static NamedTensors parameters(const Gpt2& model, DType dtype) {
    NamedTensors all;
    for (const Shape& shape : model.shapes()) {
      Tensor weight = random(shape, dtype);
      all.push_back({std::to_string(all.size()), weight.set_requires_grad(true)});
    }
    return all;
  }

  optim::FusedAdam optimizer;
};

Run adamw(const Gpt2& model) {
  const auto training = std::make_shared<Training>(model, DType::f32);
  return [training] { (void)training->optimizer.step({.check = false, .keep_gradients = true}); };
}

/// Check, unscaling, clipping, AdamW on f32 masters, the half weights: one step.
Run o2_update(const Gpt2& model, const optim::StateOptions& state) {
  const auto training = std::make_shared<Training>(model, DType::bf16, state);
  return [training] {
    (void)training->optimizer.step(
        {.gradient_scale = 1.0 / 1024, .max_gradient_norm = 1.0, .keep_gradients = true});
  };
}

/// The same update under a dynamic loss scale, with all that amp's step does beside it.
Run amp_step(const Gpt2& model) {
  const auto training = std::make_shared<Training>(model, DType::bf16);
  const auto precision =
      std::make_shared<amp::Amp>(amp::initialize(std::vector<nn::Module*>{}, {&training->optimizer},
                                                 {.opt_level = amp::OptLevel::O2,
                                                  .half_dtype = DType::bf16,
                                                  .dynamic_loss_scale = true,
                                                  .scaler = {.init_scale = 1024},
                                                  .max_gradient_norm = 1.0}));
  precision->adopt_gradients(training->optimizer);  // as if scaled by hand
  return [training, precision] { (void)precision->step({.keep_gradients = true}); };
}

/// A list of bf16 weights with f32 masters and f32 moments.
struct List {
  List(const Gpt2& model, int moments) {
    for (const Shape& shape : model.shapes()) {
      kernels::UpdateEntry e{keep(random(shape, DType::bf16)), keep(random(shape, DType::bf16)),
                             keep(random(shape)), keep(Tensor::full(shape, 0.001))};
      if (moments < 1) e.moment1 = {};
      if (moments > 1) e.moment2 = keep(Tensor::full(shape, 0.001));
      e.norm = 1.0;
      entries.push_back(e);
    }
  }
  TensorView keep(const Tensor& tensor) {
    memory.push_back(tensor);
    return tensor;
  }

  std::vector<Tensor> memory;
  std::vector<kernels::UpdateEntry> entries;
};

template <class Options>
Run update(const Gpt2& model, const Options& options) {
  const auto list = std::make_shared<List>(model, options.moments());
  return [=] { kernels::update(list->entries, options); };
}

/// Adam whose step count and learning rate stay on the device.
Run device_adam(const Gpt2& model) {
  const Tensor lr = Tensor::full({1}, 1e-3, DType::f64), step = Tensor::zeros({1}, DType::i32);
  const kernels::AdamOptions options{.weight_decay = 0.01};
  const auto list = std::make_shared<List>(model, options.moments());
  return [=] {
    kernels::advance_step(step, {});
    kernels::update(list->entries, options, {.lr = lr, .step = step});
  };
}

template <class Options>
Work rule(const char* name, const Gpt2& model, const Options& options, Bytes loop) {
  return {name, [=] { return update(model, options); },
          [=] { return memory_loop(loop, model.parameters()); }};
}

const optim::StateOptions kCompact{.moments = DType::bf16,
                                   .masters = optim::MasterStorage::remainder};

/// With the bytes of each parameter on paper (docs/measuring.md).
Work with_bytes(Work work, const Gpt2& model, double per_parameter, const char* kernels) {
  work.bytes = per_parameter * static_cast<double>(model.parameters());
  work.kernels = kernels;
  return work;
}

}  // namespace

std::vector<Work> optimizer_works() {
  const auto loop = [](Bytes bytes) {
    return [bytes] { return memory_loop(bytes, kSmall.parameters()); };
  };
  const auto o2 = [](const optim::StateOptions& state) {
    return [=] { return o2_update(kSmall, state); };
  };
  return {
      {"adamw_124m_f32", [] { return adamw(kSmall); }, loop(Bytes::adamw_f32)},
      {"o2_update_124m_bf16", o2({}), loop(Bytes::o2)},
      {"o2_update_124m_compact", o2(kCompact), loop(Bytes::o2_compact)},
      // its share: of the update with states in memory
      {"o2_update_124m_files", o2({.folder = std::filesystem::temp_directory_path()}), o2({})},
      // its share: of the update without a scaler
      {"amp_step_124m_bf16", [] { return amp_step(kSmall); }, o2({})},
      rule("lamb_update_124m", kSmall, kernels::LambOptions{.weight_decay = 0.01}, Bytes::lamb),
      rule("novograd_update_124m", kSmall, kernels::NovoGradOptions{.weight_decay = 0.01},
           Bytes::one_moment),
      rule("adagrad_update_124m", kSmall, kernels::AdagradOptions{.weight_decay = 0.01},
           Bytes::one_moment),
  };
}

std::vector<Work> gpu_optimizer_works(bool tiny) {
  const Gpt2 small = tiny ? kTiny : kSmall, large = tiny ? kTiny : kLarge;
  const auto work = [=](const char* name, double bytes, const char* kernels,
                        std::function<Run(const Gpt2&)> prepare, const Gpt2& model) {
    return with_bytes({name, [=] { return prepare(model); }}, model, bytes, kernels);
  };
  const auto rule = [=](const char* name, double bytes, const char* kernels, const auto& options) {
    return work(
        name, bytes, kernels, [=](const Gpt2& model) { return update(model, options); }, small);
  };
  const auto o2 = [](const Gpt2& model) { return o2_update(model, {}); };
  const auto compact = [](const Gpt2& model) { return o2_update(model, kCompact); };
  const char* const kAdam = "^(check_chunks_kernel<Squares>|update_kernel<Adam<)";
  const char* const kLamb = "^lamb_(moments|weights)_kernel";
  return {
      work("o2_update_124m_bf16", 30, kAdam, o2, small),
      work("o2_update_1558m_bf16", 30, kAdam, o2, large),
      work("o2_update_124m_compact", 20, kAdam, compact, small),
      work("o2_update_1558m_compact", 20, kAdam, compact, large),
      work("adamw_124m_f32", 28, "^update_kernel<Adam<", adamw, small),
      {"amp_step_124m_bf16", [=] { return amp_step(small); }, [=] { return o2(small); }},
      rule("adam_update_124m", 28, "^update_kernel<Adam<", kernels::AdamOptions{}),
      work("adam_device_update_124m", 28, "^adam_device_kernel", device_adam, small),
      rule("sgd_update_124m", 20, "^update_kernel<Sgd<", kernels::SgdOptions{.momentum = 0.9}),
      rule("adagrad_update_124m", 20, "^update_kernel<Adagrad<", kernels::AdagradOptions{}),
      rule("novograd_update_124m", 20, "^update_kernel<NovoGrad<", kernels::NovoGradOptions{}),
      rule("lamb_update_124m", 40, kLamb, kernels::LambOptions{}),
  };
}

}  // namespace bench
