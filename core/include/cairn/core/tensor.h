// Tensor: a shared, strided block of elements on one device, and what autograd needs to know of it.
//
// Copying a Tensor copies the handle. The tensor itself has no arithmetic: `cairn/autograd/ops.h`
// has the differentiable operations (and the operators), `cairn/kernels/` the raw ones on views.
// `alias` and `detach` share memory and track no gradient.
//
//   Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::parse("cpu"));
//   float* p = x.data<float>();                 // checks the dtype
//   TensorView half = x.view().slice(1, 0, 2);  // no copy
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/gradient_slot.h"
#include "cairn/core/memory.h"
#include "cairn/core/tensor_view.h"

namespace cairn::core {

class Tensor;

/// What other folders keep with a tensor; each touches its own only.
struct TensorAttachments {
  std::shared_ptr<void> graph;   // autograd's: the node that made it; null for a leaf
  std::shared_ptr<void> leaf;    // autograd's: a leaf's node and hooks; survives set_data
  std::shared_ptr<void> master;  // kernels::MasterWeight: the exact value of a half weight
  std::shared_ptr<void> parts;   // core::WeightInParts: what this rank holds of it
};

class Tensor {
 public:
  Tensor() = default;  // undefined

  static Tensor empty(const Shape& shape, DType dtype = DType::f32,
                      Device device = default_device());
  static Tensor empty_strided(const Shape& shape, const Strides& strides, DType dtype,
                              Device device);  // dense strides
  static Tensor empty_like(const Tensor& x);  // same shape, dtype, device and, where dense, strides
  static Tensor zeros(const Shape& shape, DType dtype = DType::f32,
                      Device device = default_device());
  static Tensor full(const Shape& shape, double value, DType dtype = DType::f32,
                     Device device = default_device());
  /// Copies host values, converting them to dtype.
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape, DType dtype = dtype_of<T>,
                     Device device = default_device());
  /// Shares memory of somebody else; `owner` is dropped with the last tensor that uses it.
  static Tensor wrap(const TensorView& view, std::shared_ptr<void> owner = nullptr);
  /// Shares the elements of a vector from `begin` on, row-major. The vector stays where it is and
  /// must not move its elements (by growing, or by being moved from): the next use of the tensor
  /// throws then.
  template <class T>
  static Tensor wrap(std::vector<T>& memory, const Shape& shape, std::size_t begin = 0);

  bool defined() const { return impl_ != nullptr; }
  explicit operator bool() const { return defined(); }

  const Shape& shape() const;
  const Strides& strides() const;
  int dims() const { return shape().dims(); }
  std::int64_t size(int dim) const { return shape()[wrap_dim(dim, dims(), "size")]; }
  std::int64_t numel() const { return shape().numel(); }
  std::size_t nbytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype()); }
  DType dtype() const;
  Device device() const;
  bool is_contiguous() const;

  /// Throws InvalidArgument if undefined, and where a wrapped vector has moved its elements.
  TensorView view() const;
  operator TensorView() const {
    return view();
  }  // NOLINT: kernels take views, tensors are meant to pass
  /// The first element; throws InvalidArgument unless dtype_of<T>. What is written through it into
  /// a half weight counts, however long the pointer is kept: its master is compared with it from
  /// now on.
  template <class T>
  T* data() const;
  /// The same address, for whoever only reads: view().bump_version() comes before a write through
  /// it.
  void* raw_data() const;

  /// A tensor over (part of) the same storage; `view` must point into it. No gradient.
  Tensor alias(const TensorView& view) const;
  Tensor detach() const;
  /// Points this handle's tensor, and so every handle to it, at other data (used by casts of
  /// parameters). Keeps name, requires_grad and the arena (which gives it a new slot when
  /// refreshed), drops the graph, the gradient where dtype, shape, strides or device change (a
  /// window of accumulation goes on with other values), and the master where the dtype changes. A
  /// weight that ranks held in parts is whole afterwards.
  void set_data(const Tensor& data);
  bool same(const Tensor& other) const {
    return impl_ == other.impl_;
  }  // the same tensor, not equal values
  const void* id() const { return impl_.get(); }
  bool unique()
      const;  // no other handle, alias or view shares this memory: it may be written for reuse
  const std::shared_ptr<Storage>& storage() const;

  double item() const;  // the one element, as double; waits for the device
  template <class T = double>
  std::vector<T> to_vector()
      const;  // every element in row-major order, converted; waits for the device

  // Gradient state.
  bool requires_grad() const;
  Tensor& set_requires_grad(
      bool value);  // leaves of floating dtype; throws InvalidArgument otherwise
  /// The gradient as it lies: with its loss scale, until amp::Amp::unscale(). Undefined where there
  /// is none. Throws InvalidArgument where losses of two scales left it in two parts.
  Tensor grad() const;
  void set_grad(const Tensor& grad);  // same shape; where the slot is placed in an arena: throws
  void clear_grad();
  /// Made on first use; shared by all handles of the tensor.
  GradientSlot& gradient_slot() const;
  const GradientSlot* gradient_slot_or_null() const;
  TensorAttachments& attachments() const;  // made on first use
  const TensorAttachments* attachments_or_null() const;
  /// A parameter's full name, for messages ("block.fc.weight"): modules set it when the parameter,
  /// or a module around it, is registered. May be empty.
  const std::string& name() const;
  void set_name(std::string name);

 private:
  struct Impl;
  static Tensor wrap_within(const TensorView& view, std::size_t begin, std::size_t elements,
                            std::function<const void*()> whereabouts);
  [[noreturn]] void fail_moved() const;
  const Impl& impl() const;  // throws InvalidArgument if undefined
  explicit Tensor(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

template <class T>
Tensor Tensor::wrap(std::vector<T>& memory, const Shape& shape, std::size_t begin) {
  const bool fits = begin <= memory.size();
  const TensorView view(fits ? memory.data() + begin : nullptr, shape, dtype_of<T>);
  return wrap_within(view, begin, memory.size(),
                     [&memory, begin] { return memory.empty() ? nullptr : memory.data() + begin; });
}

struct NamedTensor {
  std::string name;
  Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;

std::ostream& operator<<(std::ostream& out,
                         const Tensor& tensor);  // values (abridged), shape, dtype, device

/// Copies bytes between equally laid out dense tensors of any two devices, in the current streams'
/// order. Between a GPU and host memory that is not pinned, it is done when this returns; pinned
/// memory must stay until the stream's work is done. No conversion: kernels::copy has that.
void copy_bytes(const TensorView& src, const TensorView& dst);

}  // namespace cairn::core

namespace cairn {
using core::NamedTensor;
using core::NamedTensors;
using core::Tensor;
}  // namespace cairn
