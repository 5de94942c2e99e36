#include <memory>

#include "cairn/amp/amp.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "support/conv_net.h"
#include "support/gpt.h"
#include "works.h"

namespace bench {
namespace {

using namespace cairn;

/// A model with its optimizer and opt level, ready to step on one fixed batch. Half is bf16.
template <class Model>
struct Training {
  Training(Model m, amp::OptLevel level, Tensor inputs, Tensor labels)
      : model(std::move(m)),
        optimizer(model.parameters(), {.lr = 1e-3, .weight_decay = 0.01}),
        x(std::move(inputs)),
        target(std::move(labels)),
        precision(
            amp::initialize(model, optimizer, {.opt_level = level, .half_dtype = DType::bf16})) {}

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
Run steps(Model model, amp::OptLevel level, Tensor x, Tensor target) {
  const auto training =
      std::make_shared<Training<Model>>(std::move(model), level, std::move(x), std::move(target));
  return [training] { training->step(); };
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

support::Gpt small_gpt() {
  return support::Gpt({.vocabulary = 256, .tokens = 256, .width = 384, .layers = 6, .heads = 6});
}

Work gpt(const char* name, DType dtype) {
  return {name, [dtype] {
            return steps(small_gpt(), level_of(dtype), integers({8, 256}, 256),
                         integers({8, 256}, 256));
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
  return {convnet("convnet_step_f32", DType::f32), convnet("convnet_step_bf16", DType::bf16),
          gpt("gpt_step_f32", DType::f32), gpt("gpt_step_bf16", DType::bf16), accumulation()};
}

std::vector<Work> gpu_model_works(bool tiny) {
  const GptJob tiny_gpt{{.vocabulary = 64, .tokens = 8, .width = 32, .layers = 1, .heads = 2}, 2};
  const GptJob gpt2{{.vocabulary = 50257, .tokens = 1024, .width = 768, .layers = 12, .heads = 12},
                    16};
  auto works = levels("gpt2_124m", tiny ? tiny_gpt : gpt2);
  for (const Work& work : levels("convnet", ConvJob{tiny ? 2 : 4096})) works.push_back(work);
  return works;
}

}  // namespace bench
