// GradientArena: one contiguous buffer per device and dtype in which every parameter's gradient has
// its slot, in reverse registration order (the order in which a backward pass completes them).
// `param.grad()` is a view of its slot, laid out like the parameter; DDP's buckets are slices of a
// buffer. Nothing is ever zeroed: the first contribution after clear() overwrites, later ones
// accumulate.
//
// A parameter belongs to at most one arena, which keeps a handle to it. Casting or moving a
// parameter (Tensor::set_data) drops its slot; refresh() gives it a new one in the same arena. An
// arena that ends leaves written gradients behind as tensors of their own.
//
//   auto arena = optim::GradientArena::attach(model.parameters());
//   for (const auto& buffer : arena->buffers()) all_reduce(buffer.data);
#pragma once

#include <cstdint>
#include <memory>
#include <string>
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
    Tensor data;              // [elements], one dtype and device, category gradients; gaps hold 0
    std::vector<Slot> slots;  // ascending offsets: reverse registration order
  };

  /// The arena that these parameters (those that require a gradient) share already, refreshed if it
  /// is stale, or a new one for all of them. Parameters whose gradient lies in somebody else's
  /// memory (wrap_parameter) are left out. Gradients that are there already move into their slots.
  /// f32_slots gives half parameters f32 gradients.
  /// Throws InvalidArgument, naming one, where only some of them have an arena, where they have
  /// different ones, where one is given twice or has no dense layout, or where f32_slots are asked
  /// for and the shared arena was made without.
  static std::shared_ptr<GradientArena> attach(const NamedTensors& parameters,
                                               bool f32_slots = false);
  /// The arena that a parameter belongs to; null: none.
  static std::shared_ptr<GradientArena> of(const Tensor& parameter);

  ~GradientArena();
  GradientArena(const GradientArena&) = delete;
  GradientArena& operator=(const GradientArena&) = delete;

  const NamedTensors& parameters() const { return parameters_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  bool f32_slots() const { return f32_slots_; }

  /// True where a parameter has lost its slot, or stopped or started to require a gradient.
  bool stale() const;
  /// Lays out the slots anew for the parameters as they are now; written gradients move along.
  /// Views of the former buffers no longer belong to the arena: who holds some looks at
  /// generation().
  void refresh();
  std::uint64_t generation() const { return generation_; }  // counts layouts, from 1

  void clear();  // every slot counts as unwritten
  /// Zeroes the slots [first_slot, last_slot) that hold nothing and counts them as written: before
  /// a bucket that has gaps is reduced.
  void zero_unwritten(const Buffer& buffer, std::size_t first_slot, std::size_t last_slot);

 private:
  GradientArena(NamedTensors parameters, bool f32_slots);
  void lay_out();
  void release_slots();
  bool holds_slot_of(const Tensor& parameter) const;

  NamedTensors parameters_;
  std::vector<Buffer> buffers_;
  bool f32_slots_ = false;
  std::uint64_t generation_ = 0;
};

/// A parameter and its gradient in somebody else's memory (a foreign trainer's), for an optimizer.
/// weight and gradient: any shape, the same for both; f16, bf16 or f32; one device. `owner` is
/// dropped with the parameter. The gradient is the parameter's slot: it counts as written now and
/// until a step without StepOptions::keep_gradients; `meta().grad_written = true` says that it was
/// written again.
NamedTensor wrap_parameter(std::string name, const TensorView& weight, const TensorView& gradient,
                           std::shared_ptr<void> owner = nullptr);

}  // namespace cairn::optim
