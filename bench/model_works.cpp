#include <filesystem>
#include <memory>

#include "cairn/amp/amp.h"
#include "cairn/amp/captured_step.h"
#include "cairn/autograd/engine.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "language_model.h"
#include "resnet.h"
#include "support/conv_net.h"
#include "support/gpt.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

/// Moments and masters in the least memory; the loss in the model's dtype then.
const optim::StateOptions kCompact{DType::bf16, optim::MasterStorage::remainder};

amp::Amp initialize(nn::Module& model, optim::Optimizer& optimizer, amp::OptLevel level,
                    const optim::StateOptions& state) {
  optimizer.set_state_options(state);
  amp::Options options{.opt_level = level, .half_dtype = DType::bf16};
  if (state.masters == optim::MasterStorage::remainder) options.cast_model_outputs = DType::bf16;
  return amp::initialize(model, optimizer, options);
}

/// A model with its optimizer and opt level, ready to step on one fixed batch. Half is bf16.
template <class Model>
struct Training {
  Training(Model m, amp::OptLevel level, Tensor inputs, Tensor labels,
           const optim::StateOptions& state)
      : model(std::move(m)),
        optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 0.01}),
        x(std::move(inputs)),
        target(std::move(labels)),
        precision(initialize(model, optimizer, level, state)) {}

  void step(int micro_batches) {
    for (int k = 0; k < micro_batches; ++k) {
      precision.backward(nn::cross_entropy(model(x), target));
    }
    (void)precision.step();
  }

  Model model;
  optim::FusedAdam optimizer;
  Tensor x, target;
  amp::Amp precision;
};

template <class Model>
Run steps(Model model, amp::OptLevel level, Tensor x, Tensor target,
          const optim::StateOptions& state = {}, int micro_batches = 1, bool f32_sums = true) {
  const auto training = std::make_shared<Training<Model>>(std::move(model), level, std::move(x),
                                                          std::move(target), state);
  optim::GradientArena::attach(training->model.parameters())->accumulate_in_f32(f32_sums);
  return [=] { training->step(micro_batches); };
}

/// bf16 is O1, which is what PyTorch's autocast does.
amp::OptLevel level_of(DType dtype) {
  return dtype == DType::f32 ? amp::OptLevel::O0 : amp::OptLevel::O1;
}

Work convnet(const char* name, DType dtype) {
  return {name, [dtype] {
            return steps(support::conv_net(), level_of(dtype), random({100, 1, 28, 28}),
                         integers({100}, 10));
          }};
}

support::Gpt small_gpt(std::int64_t tokens = 256) {
  return support::Gpt({.vocabulary = 256, .tokens = tokens, .width = 384, .layers = 6, .heads = 6});
}

/// A step on 2048 tokens.
Work gpt(const char* name, DType dtype, std::int64_t tokens = 256) {
  return {name, [=] {
            const Shape shape{2048 / tokens, tokens};
            return steps(small_gpt(tokens), level_of(dtype), integers(shape, 256),
                         integers(shape, 256));
          }};
}

/// What states in files cost: the share of the time that those in memory take.
Work gpt_with_states_in_files(const char* name, std::int64_t tokens) {
  const auto at_o2 = [tokens](const optim::StateOptions& state) {
    return steps(small_gpt(), amp::OptLevel::O2, integers({tokens / 256, 256}, 256),
                 integers({tokens / 256, 256}, 256), state);
  };
  return {name, [=] { return at_o2({.folder = std::filesystem::temp_directory_path()}); },
          [=] { return at_o2({}); }};
}

Work resnet(const char* name, amp::OptLevel level) {
  return {name, [level] {
            return steps(ResNet18(), level, random({32, 3, 32, 32}), integers({32}, 10));
          }};
}

/// Two micro-batches: what half precision saves of the process's memory.
Work resnet_accumulated(const char* name, amp::OptLevel level,
                        const optim::StateOptions& state = {}, bool f32_sums = true) {
  return {name, [=] {
            return steps(ResNet18(), level, random({32, 3, 32, 32}), integers({32}, 10), state, 2,
                         f32_sums);
          }};
}

Work lstm(const char* name, amp::OptLevel level, const optim::StateOptions& state = {}) {
  return {name, [=] {
            return steps(LanguageModel(10000, 512, 2), level, integers({250, 8}, 10000),
                         integers({250, 8}, 10000), state);
          }};
}

/// The last layer and the loss of a language model of 40,000 words, on 32 x 250 tokens.
template <class Loss>
Work vocabulary(const char* name, Loss loss) {
  return {name, [loss] {
            Tensor x = random({8000, 512}), weight = random({40000, 512});
            kernels::affine(weight, 0.05, 0.0, weight);
            const Tensor target = integers({8000}, 40000);
            x.set_requires_grad(true), weight.set_requires_grad(true);
            return [=] {
              x.gradient_slot().clear(), weight.gradient_slot().clear();
              autograd::backward(loss(x, weight, target));
            };
          }};
}
Work vocabulary_plain() {
  return vocabulary("vocabulary_40k_plain", [](auto& x, auto& weight, auto& target) {
    return nn::cross_entropy(autograd::linear(x, weight), target);
  });
}
Work vocabulary_fused(const char* name, bool recompute) {
  return vocabulary(name, [recompute](auto& x, auto& weight, auto& target) {
    return nn::linear_cross_entropy(x, weight, {}, target, {}, recompute);
  });
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
  optim::GradientArena::attach(training->model.parameters())->accumulate_in_f32(f32_sums);
  return [training] {
    for (int k = 0; k < 2; ++k) {
      training->precision.backward(
          nn::cross_entropy(training->model(training->x), training->target));
    }
    (void)training->precision.step();
  };
}

/// What f32 sums cost: the share of the time that sums in bf16 take.
Work accumulation() {
  return {"gpt_accumulate_2_bf16", [] { return accumulated_steps(true); },
          [] { return accumulated_steps(false); }};
}

/// Initialisation draws on the CPU.
template <class Make>
auto on_default_device(Make make) {
  const Device device = core::default_device();
  const core::DefaultDeviceGuard host(Device{});
  auto model = make();
  model.to(device);
  return model;
}

struct GptJob {
  support::GptSizes sizes;
  std::int64_t batch;

  Run prepare(amp::OptLevel level) const {
    const Shape shape{batch, sizes.tokens};
    return steps(on_default_device([this] { return support::Gpt(sizes); }), level,
                 integers(shape, sizes.vocabulary), integers(shape, sizes.vocabulary));
  }
  double tokens() const { return static_cast<double>(batch * sizes.tokens); }
  /// Of the products, forward and backward, counted with a causal mask that leaves half.
  double operations() const {
    const auto d = static_cast<double>(sizes.width), t = static_cast<double>(sizes.tokens);
    const double weights =
        static_cast<double>(sizes.layers) * 12 * d * d + static_cast<double>(sizes.vocabulary) * d;
    return tokens() * (6 * weights + 6 * static_cast<double>(sizes.layers) * t * d);
  }
};

struct ConvJob {
  std::int64_t batch;

  Run prepare(amp::OptLevel level) const {
    return steps(on_default_device(support::conv_net), level, random({batch, 1, 28, 28}),
                 integers({batch}, 10));
  }
  double tokens() const { return static_cast<double>(batch); }
  double operations() const { return 0; }
};

/// Steps at O2 on sequences of these lengths, one after another.
Run steps_of_lengths(const GptJob& job, const std::vector<std::int64_t>& lengths) {
  const auto training = std::make_shared<Training<support::Gpt>>(
      on_default_device([&] { return support::Gpt(job.sizes); }), amp::OptLevel::O2, Tensor(),
      Tensor(), optim::StateOptions{});
  std::vector<Tensor> batches;
  for (const std::int64_t length : lengths)
    batches.push_back(integers({job.batch, length}, job.sizes.vocabulary));
  return [=] {
    for (const Tensor& batch : batches) {
      training->x = training->target = batch;
      training->step(1);
    }
  };
}

/// Lengths that change from step to step; the share: as many tokens in sequences of one length.
Work changing_lengths(const std::string& name, const GptJob& job) {
  std::vector<std::int64_t> lengths;
  std::int64_t all = 0;
  for (const std::int64_t k : {5, 1, 7, 2, 8, 3, 6, 4}) {  // 9/16 to 16/16 of the most, a bit less
    lengths.push_back(job.sizes.tokens * (8 + k) / 16 - (k % 3));
    all += lengths.back();
  }
  const auto count = static_cast<std::int64_t>(lengths.size());
  const std::vector<std::int64_t> same(lengths.size(), all / count);
  Work work{name, [=] { return steps_of_lengths(job, lengths); },
            [=] { return steps_of_lengths(job, same); }};
  work.items = static_cast<double>(job.batch * all);
  return work;
}

/// Blocks of a GPT at O2; what is timed is a step.
struct Blocks {
  explicit Blocks(const GptJob& job)
      : model(on_default_device([&] { return made(job.sizes); })),
        optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 0.01}),
        precision(amp::initialize(model, optimizer,
                                  {.opt_level = amp::OptLevel::O2, .half_dtype = DType::bf16})),
        x(random({job.batch, job.sizes.tokens, job.sizes.width})) {}
  static nn::Sequential made(const support::GptSizes& sizes) {
    nn::Sequential blocks;
    for (std::int64_t i = 0; i < sizes.layers; ++i) blocks.add(support::GptBlock(sizes));
    return blocks;
  }
  Tensor loss(const Tensor& input) {
    const Tensor y = autograd::to(model(precision.cast(input)), DType::f32);
    return autograd::mean(autograd::mul(y, y));
  }

  nn::Sequential model;
  optim::FusedAdam optimizer;
  amp::Amp precision;
  Tensor x;
  std::unique_ptr<amp::CapturedStep> captured;
};

Run captured_steps(const GptJob& job) {
  const auto blocks = std::make_shared<Blocks>(job);
  Blocks& own = *blocks;
  own.captured = std::make_unique<amp::CapturedStep>(
      own.precision, [&own](const Tensor& input) { return own.loss(input); });
  return [blocks] { (*blocks->captured)(blocks->x); };
}

Run eager_steps(const GptJob& job) {
  const auto blocks = std::make_shared<Blocks>(job);
  return [blocks] {
    blocks->precision.backward(blocks->loss(blocks->x));
    (void)blocks->precision.step();
  };
}

/// A whole step as one graph; the share: the time that the step takes without.
Work captured(const std::string& name, const GptJob& job) {
  Work work{name, [=] { return captured_steps(job); }, [=] { return eager_steps(job); }};
  work.items = job.tokens();
  return work;
}

/// O0, O1 and O2 of a job; the share of the halves is O0's time over theirs.
template <class Job>
std::vector<Work> levels(const std::string& name, const Job& job) {
  using amp::OptLevel;
  const auto at = [job](OptLevel level) { return [=] { return job.prepare(level); }; };
  std::vector<Work> works{{name + "_o0", at(OptLevel::O0)},
                          {name + "_o1", at(OptLevel::O1), at(OptLevel::O0)},
                          {name + "_o2", at(OptLevel::O2), at(OptLevel::O0)}};
  for (Work& work : works) work.items = job.tokens(), work.operations = job.operations();
  return works;
}

}  // namespace

std::vector<Work> model_works() {
  using amp::OptLevel;
  return {convnet("convnet_step_f32", DType::f32),
          convnet("convnet_step_bf16", DType::bf16),
          resnet("resnet18_step_f32", OptLevel::O0),
          resnet("resnet18_step_bf16", OptLevel::O1),
          resnet("resnet18_step_o2", OptLevel::O2),
          resnet_accumulated("resnet18_accumulate_2_f32", OptLevel::O0),
          resnet_accumulated("resnet18_accumulate_2_o2", OptLevel::O2),
          resnet_accumulated("resnet18_accumulate_2_o2_compact", OptLevel::O2, kCompact),
          resnet_accumulated("resnet18_accumulate_2_o2_bf16_sums", OptLevel::O2, kCompact, false),
          lstm("lstm_step_f32", OptLevel::O0),
          lstm("lstm_step_bf16", OptLevel::O1),
          lstm("lstm_step_o2", OptLevel::O2, kCompact),
          gpt("gpt_step_f32", DType::f32),
          gpt("gpt_step_bf16", DType::bf16),
          gpt("gpt_t1024_step_f32", DType::f32, 1024),
          gpt("gpt_t1024_step_bf16", DType::bf16, 1024),
          gpt_with_states_in_files("gpt_step_o2_files", 2048),
          accumulation(),
          vocabulary_plain(),
          vocabulary_fused("vocabulary_40k", false),
          vocabulary_fused("vocabulary_40k_recompute", true)};
}

std::vector<Work> gpu_model_works(bool tiny) {
  const GptJob tiny_gpt{{.vocabulary = 64, .tokens = 8, .width = 32, .layers = 1, .heads = 2}, 2};
  const GptJob gpt2{{.vocabulary = 50257, .tokens = 1024, .width = 768, .layers = 12, .heads = 12},
                    16};
  auto works = levels("gpt2_124m", tiny ? tiny_gpt : gpt2);
  for (const Work& work : levels("convnet", ConvJob{tiny ? 2 : 4096})) works.push_back(work);
  const GptJob small{{.vocabulary = 256, .tokens = 256, .width = 384, .layers = 6, .heads = 6}, 8};
  works.push_back(changing_lengths("lengths_gpt2_124m_o2", tiny ? tiny_gpt : gpt2));
  works.push_back(captured("captured_blocks_384_o2", tiny ? tiny_gpt : small));
  works.push_back(captured("captured_blocks_768_o2", tiny ? tiny_gpt : gpt2));
  return works;
}

}  // namespace bench
