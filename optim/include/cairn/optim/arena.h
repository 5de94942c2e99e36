// GradientArena: one contiguous buffer per device and dtype in which every parameter's gradient has its slot, in reverse registration
// order (the order in which a backward pass completes them). `param.grad()` is a view of its slot; DDP's buckets are slices of the buffer;
// the optimizer's passes run over it. Nothing is ever zeroed: the first contribution after clear() overwrites, later ones accumulate.
//
// A parameter belongs to at most one arena. Casting a parameter (Tensor::set_data) drops its slot; attach() again.
#pragma once

#include <memory>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::optim {

class GradientArena {
 public:
  struct Slot {
    std::size_t parameter = 0;  // index in parameters()
    std::int64_t offset = 0;    // elements from the buffer's start, aligned to 64 bytes
    std::int64_t numel = 0;
  };
  struct Buffer {
    Tensor data;              // [elements], one dtype and device, category gradients
    std::vector<Slot> slots;  // ascending offsets: reverse registration order
  };

  /// The arena that these parameters (those that require a gradient) share already, or a new one for all of them.
  /// Throws InvalidArgument where only some of them have one. f32_slots gives half parameters f32 gradients.
  static std::shared_ptr<GradientArena> attach(const NamedTensors& parameters, bool f32_slots = false);

  const NamedTensors& parameters() const { return parameters_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  void clear();  // every slot counts as unwritten
  /// Zeroes the slots that hold nothing and counts them as written: before a bucket that has gaps is reduced.
  void zero_unwritten(const Buffer& buffer, std::size_t first_slot, std::size_t last_slot);

 private:
  NamedTensors parameters_;
  std::vector<Buffer> buffers_;
};

}  // namespace cairn::optim
