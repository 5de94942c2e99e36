#include "training_plan/model_bytes.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <unordered_set>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/nn/module.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kUpdatedElements = std::size_t{1} << 21;  // as many as are timed
constexpr std::size_t kUpdateScratch = 8;   // of the room: what is left to the passes themselves
constexpr std::size_t kSlotAlignment = 64;  // of an arena's slots

std::unordered_set<const void*> batch_norm_tensors(nn::Module& model) {
  std::unordered_set<const void*> ids;
  for (const auto& [name, module] : model.modules()) {
    if (!module->is_batch_norm()) continue;
    for (const auto& parameter : module->parameters()) ids.insert(parameter.tensor.id());
    for (const auto& buffer : module->buffers()) ids.insert(buffer.tensor.id());
  }
  return ids;
}

// What one parameter has in memory.
struct ElementBytes {
  DType weight, gradient, moments;
  DType master;  // f32, i16 for a remainder; the weight's dtype for none

  std::size_t of_update(bool half, int kept_moments) const {
    const std::size_t values = core::size_of(gradient) + core::size_of(weight);
    return values + (half ? core::size_of(master) : 0) +
           static_cast<std::size_t>(kept_moments) * core::size_of(moments);
  }
};

ElementBytes element_bytes(const Precision& precision, bool half, bool compact, bool accumulates) {
  ElementBytes bytes{DType::f32, DType::f32, compact ? DType::bf16 : DType::f32, DType::f32};
  if (!half) return bytes;
  bytes.weight = precision.half;
  bytes.gradient = accumulates ? DType::f32 : precision.half;
  if (compact && precision.half == DType::bf16) bytes.master = DType::i16;
  return bytes;
}

// Tables of pointers that a GPU keeps of the lists that a step checks and updates: so much a
// tensor, and a chunk of each.
constexpr std::size_t kListsOfAStep = 3, kTableSlotBytes = 64, kChunkElements = 1 << 14,
                      kChunkBytes = 4;

std::size_t table_bytes(std::size_t elements) {
  const std::size_t chunks = (elements + kChunkElements - 1) / kChunkElements;
  return kListsOfAStep * (kTableSlotBytes + chunks * kChunkBytes);
}

std::size_t align_slot(std::size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

void set_half(const Tensor& tensor, DType half) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  const Tensor former = tensor.detach();
  const Tensor cast =
      Tensor::empty_strided(former.shape(), former.strides(), half, former.device());
  kernels::copy(former, cast);
  Tensor(tensor).set_data(cast);
}

}  // namespace

ModelBytes::ModelBytes(nn::Module& model, Device device) : device_(device) {
  const core::MemoryStats stats = core::memory_stats(device);
  const std::unordered_set<const void*> batch_norms = batch_norm_tensors(model);
  std::size_t own =
      stats.of(core::MemoryCategory::gradients) + stats.of(core::MemoryCategory::optimizer_state);
  for (const auto& [name, tensor] : model.parameters()) {
    CAIRN_CHECK(tensor.dtype() == DType::f32 && tensor.device() == device, "plan_training",
                "expected an f32 model on the batch's device, ", device, ", got '", name, "' of ",
                tensor.dtype(), " on ", tensor.device(), " (plan before amp::initialize)");
    const auto elements = static_cast<std::size_t>(tensor.numel());
    parameters_.push_back({elements, tensor.requires_grad(), !batch_norms.contains(tensor.id())});
    if (tensor.requires_grad()) trained_elements_ += elements;
    own += tensor.nbytes();
  }
  CAIRN_CHECK(!model.has_forward_wrapper("amp"), "plan_training",
              "expected a model before amp::initialize, got one after it");
  other_ = stats.current_total > own ? stats.current_total - own : 0;
  for (const Parameter& p : parameters_) {
    if (device.is_cuda() && p.trained) other_ += table_bytes(p.elements);
  }
}

StepBytes ModelBytes::of(const Precision& precision, bool compact, int moments,
                         bool accumulates) const {
  StepBytes all;
  for (const Parameter& p : parameters_) {
    const bool half = precision.half_weights && p.may_be_half;
    const ElementBytes bytes = element_bytes(precision, half, compact, accumulates);
    all.weights += p.elements * core::size_of(bytes.weight);
    if (half) all.optimizer_state += p.elements * core::size_of(bytes.master);
    if (!p.trained) continue;
    all.gradients += align_slot(p.elements * core::size_of(bytes.gradient));
    all.optimizer_state +=
        p.elements * core::size_of(bytes.moments) * static_cast<std::size_t>(moments);
  }
  return all;
}

std::size_t ModelBytes::largest_gradient(const Precision& precision) const {
  std::size_t largest = 0;
  for (const Parameter& p : parameters_) {
    const bool half = precision.half_weights && p.may_be_half;
    const DType dtype = half ? precision.half : DType::f32;
    if (p.trained) largest = std::max(largest, p.elements * core::size_of(dtype));
  }
  return largest;
}

double ModelBytes::update_seconds(const Precision& precision, bool compact, int moments,
                                  bool accumulates, std::size_t room) {
  const DType half = precision.half_weights ? precision.half : DType::f32;
  const auto [known, is_new] = measured_.try_emplace({half, compact, moments, accumulates}, 0.0);
  if (is_new) {
    known->second = update_seconds_per_element(precision, compact, moments, accumulates, room);
  }
  return known->second * static_cast<double>(trained_elements_);
}

double ModelBytes::update_seconds_per_element(const Precision& precision, bool compact, int moments,
                                              bool accumulates, std::size_t room) const {
  const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
  const bool half = precision.half_weights;
  const ElementBytes bytes = element_bytes(precision, half, compact, accumulates);
  const std::size_t place = room - room / kUpdateScratch;
  const std::size_t most = std::min(kUpdatedElements, place / bytes.of_update(half, moments));
  const auto n =
      static_cast<std::int64_t>(std::max<std::size_t>(1, std::min(trained_elements_, most)));
  const auto zeros = [&](DType dtype) { return Tensor::zeros({n}, dtype, device_); };
  const Tensor gradient = zeros(bytes.gradient), weight = zeros(bytes.weight);
  const Tensor master = half ? zeros(bytes.master) : Tensor();
  const Tensor moment1 = moments > 0 ? zeros(bytes.moments) : Tensor();
  const Tensor moment2 = moments > 1 ? zeros(bytes.moments) : Tensor();
  const auto view = [](const Tensor& x) { return x.defined() ? x.view() : TensorView(); };
  const kernels::UpdateEntry entry{gradient.view(), weight.view(), view(master), view(moment1),
                                   view(moment2)};
  const kernels::UpdateRule rule =
      moments == 2 ? kernels::UpdateRule(kernels::AdamOptions())
                   : kernels::UpdateRule(kernels::SgdOptions{.momentum = moments == 1 ? 0.9 : 0.0});
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < 3; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    kernels::check_tensors({gradient.view()}).read();
    kernels::update({entry}, rule);
    core::Stream::current(device_).synchronize();
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(end - begin).count());
  }
  return best / static_cast<double>(n);
}

std::shared_ptr<nn::Module> half_clone(const nn::Module& module, DType half) {
  std::shared_ptr<nn::Module> copy = module.clone();
  const std::unordered_set<const void*> batch_norms = batch_norm_tensors(*copy);
  for (const auto& list : {copy->parameters(), copy->buffers()}) {
    for (const auto& [name, tensor] : list) {
      if (tensor.dtype() != DType::f32 || batch_norms.contains(tensor.id())) continue;
      set_half(tensor, half);
    }
  }
  return copy;
}

}  // namespace cairn::checkpointing
