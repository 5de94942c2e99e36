// The largest batch that a memory budget has room for, found by steps of a training: Lightning's
// batch-size finder. Where micro-batches, recomputation or a half level would let a larger one
// pass, training_plan.h says which.
//
//   const auto found = checkpointing::largest_batch(
//       [&](std::int64_t batch) {
//         const Tensor x = Tensor::empty({batch, 3, 32, 32}, DType::f32, device);
//         const Tensor labels = Tensor::zeros({batch}, DType::i64, device);
//         autograd::backward(nn::cross_entropy(model(x), labels));
//         model.clear_grad();
//       },
//       {.device = device, .budget = std::size_t{8} << 30});
//   data::DataLoader loader(train, sampler, {.batch_size = found.batch});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cairn/core/device.h"

namespace cairn::checkpointing {

struct BatchSizeOptions {
  Device device = core::default_device();
  /// Bytes of live tensors on the device, with what lives already. 0: the device's capacity, which
  /// a CPU has only where CAIRN_DEVICE_MEMORY or core::set_memory_capacity says so.
  std::size_t budget = 0;
  std::int64_t most = 1 << 16;
};

struct BatchSize {
  std::int64_t batch = 0;
  std::size_t peak_bytes = 0;  // of live tensors, in a step of it
};

/// Calls `step` with batches of 1, 2, 4 ... samples until one passes the budget, and then with
/// those between that halve what is not known: some 2 log2(batch) steps. A step does what the
/// training's does, with any values; it may throw core::OutOfMemory and must then have nothing
/// left. What a first step makes for good (gradients, an optimizer's state) counts from the second
/// on, so the batch that is found has run after it. Steps are taken to need more memory the larger
/// the batch. Throws core::OutOfMemory where one sample does not fit, with what it took, and
/// InvalidArgument without a budget.
BatchSize largest_batch(const std::function<void(std::int64_t batch)>& step,
                        const BatchSizeOptions& options = {});

}  // namespace cairn::checkpointing
