// GradientArena: one contiguous buffer per device and dtype in which every parameter's gradient has
// its slot, in reverse registration order (the order in which a backward pass completes them).
// `param.grad()` is a view of its slot, laid out like the parameter; DDP's buckets are slices of a
// buffer. Nothing is ever zeroed: the first contribution after clear() overwrites, later ones
// accumulate.
//
// A parameter belongs to at most one arena, which keeps a handle to it. A frozen parameter belongs
// to it without a slot: it takes no memory until it is unfrozen, and has a slot before its first
// backward then. Casting or moving a parameter (Tensor::set_data) drops its slot; refresh() gives
// it a new one in the same arena. An arena that ends leaves gradients behind as tensors of their
// own.
//
// Where ranks divide gradients (ZeRO, stage 2) the arena has no buffers: each gradient is a tensor
// of its own until it is reduced, and "slots" below are these.
//
// Slots hold gradients in the parameters' dtype. When a second backward is about to add to half
// gradients, the arena turns to f32 slots for good (sums of many half gradients lose theirs; a
// single one a step pays nothing), unless accumulate_in_f32(false) says otherwise.
//
//   auto arena = gradients::GradientArena::attach(model.parameters());
//   for (const auto& buffer : arena->buffers()) group.all_reduce(buffer.data);
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::gradients {

/// Tensors of another library's that share the parameters' memory (libtorch::Model).
class SharedParameters {
 public:
  virtual ~SharedParameters() = default;
  /// What was changed there (written, frozen, cleared) holds for the parameters from now on. Throws
  /// where it cannot.
  virtual void pull_foreign_changes() = 0;
  /// The other way: weights that were written, gradients that came or went.
  virtual void push_changes() = 0;
};

class GradientArena final : public core::GradientMemory,
                            public std::enable_shared_from_this<GradientArena> {
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

  /// The arena of all of these parameters: a new one; the one that some of them have, which takes
  /// in the others (and what further arenas they have). Parameters whose gradient lies in somebody
  /// else's memory (wrap_parameter) are left out. Gradients that are there already move into their
  /// slots. f32_slots gives half parameters f32 gradients from the start. While `without_buffers`
  /// lives slots lie in no buffer: gradients are tensors of their own. Throws InvalidArgument,
  /// naming it, where one is given twice or has no dense layout.
  static std::shared_ptr<GradientArena> attach(const NamedTensors& parameters,
                                               bool f32_slots = false,
                                               std::weak_ptr<const void> without_buffers = {});
  /// The arena that a parameter belongs to; null: none.
  static std::shared_ptr<GradientArena> of(const Tensor& parameter);

  ~GradientArena() override;
  GradientArena(const GradientArena&) = delete;
  GradientArena& operator=(const GradientArena&) = delete;

  const NamedTensors& parameters() const { return parameters_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  bool f32_slots() const { return f32_slots_; }
  DType gradient_dtype(const Tensor& parameter) const;  // of its slot
  /// Lays out f32 slots from now on.
  void use_f32_slots();
  void accumulate_in_f32(bool value) { accumulate_in_f32_ = value; }

  /// A run's first write: the moment to give slots to parameters that were unfrozen, and to turn to
  /// f32 where it will add to half gradients.
  void begin(core::RunId run);
  /// True where a parameter has lost its slot, or stopped or started to require a gradient; where
  /// there are no buffers, also where its dtype or device is another one.
  bool stale() const;
  /// Lays out the slots anew for the parameters as they are now; written gradients move along.
  /// Views of the former buffers no longer belong to the arena: who holds some looks at
  /// generation().
  void refresh();
  std::uint64_t generation() const { return generation_; }  // counts layouts, from 1

  void clear();  // every slot

  /// From now on these follow what optimizers and a join's zero() see and do.
  void share(std::weak_ptr<SharedParameters> theirs) { shared_.push_back(std::move(theirs)); }
  void pull_foreign_changes() const;
  void push_changes() const;

 private:
  /// What a slot is laid out for.
  struct Layout {
    Device device;
    DType dtype = DType::f32;
    bool requires_grad = false;
    bool operator==(const Layout&) const = default;
  };
  GradientArena() = default;
  std::vector<Layout> layouts() const;
  bool has_buffers() const { return without_buffers_.expired(); }
  void take_in(const NamedTensors& parameters);
  void order_like(const NamedTensors& parameters);
  void lay_out();
  void lay_out_alone();
  void displace_slots();
  bool holds_slot_of(const Tensor& parameter) const;
  bool would_add_to_half() const;

  NamedTensors parameters_;
  std::vector<Buffer> buffers_;
  std::vector<std::weak_ptr<SharedParameters>> shared_;
  bool f32_slots_ = false;
  bool accumulate_in_f32_ = true;
  std::weak_ptr<const void> without_buffers_;  // who asked for it
  std::vector<Layout> laid_out_;               // where there are none: of each parameter
  core::RunId last_run_ = 0;
  std::uint64_t generation_ = 0;
};

/// Whether an optimizer that lives steps this parameter.
bool has_optimizer(const Tensor& parameter);

/// A parameter and its gradient in somebody else's memory (a foreign trainer's), for an optimizer.
/// weight and gradient: any shape, the same for both; f16, bf16 or f32; one device. `owner` is
/// dropped with the parameter. The gradient is the parameter's slot: it counts as written now and
/// until a step without StepOptions::keep_gradients; gradient_slot().mark_written() says that it
/// was written again.
NamedTensor wrap_parameter(std::string name, const TensorView& weight, const TensorView& gradient,
                           std::shared_ptr<void> owner = nullptr);
/// The same of wrapped tensors (Tensor::wrap of a vector: a vector that moves its elements is an
/// error).
NamedTensor wrap_parameter(std::string name, Tensor weight, Tensor gradient);

}  // namespace cairn::gradients
