#include "cairn/libtorch/generator.h"

#include <ATen/Context.h>
#include <torch/types.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/libtorch/tensors.h"

namespace cairn::libtorch {

namespace {

std::vector<std::pair<std::string, at::Generator>> default_generators() {
  std::vector<std::pair<std::string, at::Generator>> all{
      {"cpu", at::globalContext().defaultGenerator(at::Device(at::kCPU))}};
  const auto gpus =
      at::hasCUDA() ? at::globalContext().getAcceleratorHooksInterface(at::kCUDA).deviceCount() : 0;
  for (c10::DeviceIndex i = 0; i < gpus; ++i) {
    all.emplace_back(core::str("cuda", static_cast<int>(i)),
                     at::globalContext().defaultGenerator(at::Device(at::kCUDA, i)));
  }
  return all;
}

void set(at::Generator& generator, const torch::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

torch::Tensor get(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

StateDict Generators::state_dict() const {
  StateDict state;
  for (auto& [name, generator] : default_generators()) state.set(name, to_cairn(get(generator)));
  return state;
}

void Generators::load_state_dict(const StateDict& state) {
  std::vector<std::pair<at::Generator, torch::Tensor>> before;
  try {
    for (auto& [name, generator] : default_generators()) {
      const torch::Tensor loaded = to_torch(state.tensor(name)).clone();
      before.emplace_back(generator, get(generator));
      set(generator, loaded);
    }
  } catch (const c10::Error& error) {
    for (auto& [generator, was] : before) set(generator, was);
    core::fail<core::DataError>("state",
                                "expected a generator's state, got one that libtorch refuses: ",
                                error.what_without_backtrace());
  }
}

}  // namespace cairn::libtorch
