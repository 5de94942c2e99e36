// MasterWeight: the exact value of a half weight, kept beside it: as an f32 master (4 bytes an element),
// or, of a bf16 weight, as the 16 bits that its f32 value has more (2 bytes). Both are exact; files and
// copies hold the f32 value.
//
// A master belongs to one version of its weight (core::Storage::version). Whoever writes the weight
// itself (an initialiser, a clamp, an average) makes that version grow, and the next one who asks for the
// master gets one that has followed: elements that were written are the written values, the others keep
// their exact ones (a remainder does not tell which were written: all are the weight's then). Writes through a raw pointer are seen only after Storage::bump_version().
//
// Everything is queued on the current stream of the weight's device.
#pragma once

#include <cstdint>

#include "cairn/core/tensor.h"

namespace cairn::kernels {

enum class MasterStorage : std::uint8_t { f32, remainder };

class MasterWeight {
 public:
  /// The weight's master, following the weight where that was written since; null: none.
  static MasterWeight* of(const Tensor& weight);
  /// As it was when it last agreed with the weight; null: none.
  static MasterWeight* peek(const Tensor& weight);
  static bool exists(const Tensor& weight) { return peek(weight) != nullptr; }

  /// Gives a half weight its exact value (f32, of its shape): the weight becomes the rounded one. With
  /// f32 storage the memory of `exact` is taken over where nobody else uses it and it is laid out like
  /// the weight. Remainders round halves away from zero, masters to even.
  /// Throws InvalidArgument, with the weight's name, for a weight that is not half, or for a remainder of
  /// an f16 one.
  static MasterWeight& assign(const Tensor& weight, Tensor exact,
                              MasterStorage storage = MasterStorage::f32);
  /// The same with the half value as the exact one: the weight is not written.
  static MasterWeight& make(const Tensor& weight, MasterStorage storage = MasterStorage::f32);
  static void drop(const Tensor& weight);  // the weight is its own value from now on

  MasterStorage storage() const;
  /// f32, or the i16 remainder; laid out like the weight. For update kernels, which write both: they
  /// end with weight_written().
  const Tensor& tensor() const { return tensor_; }
  /// Writes a value (any floating dtype, of its shape) into both.
  void write(const Tensor& weight, const Tensor& value);
  /// The weight and the master agree as they are now.
  void weight_written(const Tensor& weight);

 private:
  void follow(const Tensor& weight);

  Tensor tensor_;
  const core::Storage* storage_ = nullptr;  // the weight's, when the two agreed
  std::uint64_t version_ = 0;               // of it
};

/// The exact value of any tensor in f32: its master (sharing the memory), weight and remainder put
/// together, an f32 tensor itself, a half one without a master widened.
Tensor master_value(const Tensor& weight);

/// Writes a value (any floating dtype, of its shape) into a weight and its master. keep_exact: a half
/// weight that has no master gets one where the value does not fit it (waits for the device).
void write_weight(const Tensor& weight, const Tensor& value, bool keep_exact);

}  // namespace cairn::kernels
