// MasterWeight: the exact value of a half weight, kept beside it: as an f32 master (4 bytes an
// element), or, of a bf16 weight, as the 16 bits that its f32 value has more (2 bytes). Both are
// exact; files and copies hold the f32 value.
//
// A master belongs to one version of its weight (core::Storage::version). Whoever writes the weight
// itself (an initialiser, a clamp, an average) makes that version grow, and the next one who asks
// for the master gets one that has followed: elements that were changed are the written values, the
// others keep their exact ones. A remainder does not tell what the weight was: before a kernel's
// first write the weight is copied (2 bytes an element, until the master has followed). Writes
// through the pointer of Tensor::data() are followed too, and those through another pointer that
// view().bump_version() comes before; a Storage::bump_version() after them drops all remainders.
//
// The master itself is not written by others: a kernel that would, throws InvalidArgument.
//
// Everything is queued on the current stream of the weight's device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/core/write_count.h"

namespace cairn::kernels {

enum class MasterStorage : std::uint8_t { f32, remainder };

class MasterWeight {
 public:
  /// The weight's master, following the weight where that was written since; null: none.
  static MasterWeight* of(const Tensor& weight);
  /// As it was when it last agreed with the weight; null: none.
  static MasterWeight* peek(const Tensor& weight);
  static bool exists(const Tensor& weight) { return peek(weight) != nullptr; }

  /// Gives a half weight its exact value (f32, of its shape): the weight becomes the rounded one.
  /// With f32 storage the memory of `exact` is taken over where nobody else uses it and it is laid
  /// out like the weight. Remainders round halves away from zero, masters to even. Throws
  /// InvalidArgument, with the weight's name, for a weight that is not half, or for a remainder of
  /// an f16 one.
  static MasterWeight& assign(const Tensor& weight, Tensor exact,
                              MasterStorage storage = MasterStorage::f32);
  /// The same with the half value as the exact one: the weight is not written.
  static MasterWeight& make(const Tensor& weight, MasterStorage storage = MasterStorage::f32);
  static void drop(const Tensor& weight);  // the weight is its own value from now on

  MasterStorage storage() const;
  /// f32, or the i16 remainder; laid out like the weight. For reading.
  const Tensor& tensor() const { return tensor_; }
  /// The same for those who write both, as update kernels do; they end with weight_written().
  TensorView view_to_write() const;
  /// Writes a value (any floating dtype, of its shape) into both.
  void write(const Tensor& weight, const Tensor& value);
  /// The weight and the master agree as they are now.
  void weight_written(const Tensor& weight);

 private:
  class Watch;
  void follow(const Tensor& weight);
  void keep(const Tensor& weight, Tensor master);

  Tensor tensor_;
  std::shared_ptr<core::WriteGuard> seal_;  // of tensor_
  std::shared_ptr<Watch> watch_;            // of the weight, since the two agreed
};

/// An update wrote all of these, and their masters where they have some. Some may share a storage.
void weights_written(const std::vector<Tensor>& weights);

/// The exact value of any tensor in f32: its master (sharing the memory), weight and remainder put
/// together, an f32 tensor itself, a half one without a master widened.
Tensor master_value(const Tensor& weight);

/// The same for others to keep: what is not a tensor's own memory (a half one's) is not written by
/// them. A kernel that would, throws InvalidArgument, since the tensor would not follow.
Tensor exported_value(const Tensor& weight);

/// Writes a value (any floating dtype, of its shape) into a weight and its master. keep_exact: a
/// half weight that has no master gets one where the value does not fit it (waits for the device).
void write_weight(const Tensor& weight, const Tensor& value, bool keep_exact);

}  // namespace cairn::kernels
