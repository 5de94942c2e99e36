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
// Where ranks divide an optimizer's state (ZeRO), each keeps the master of its part alone: the
// elements of keep_part(), [n]. The weight is whole on every rank (but for stage 3, where it lies
// in parts too: core::WeightInParts); its exact value is not, and whoever needs all of it (a cast
// to f32, an average) gets Unsupported.
//
// Everything is queued on the current stream of the weight's device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/core/state_dict.h"
#include "cairn/core/tensor.h"
#include "cairn/core/write_count.h"
#include "cairn/kernels/empty_with_layout_of.h"

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
  /// Keeps the master of these elements alone, for good; does nothing where they are those that it
  /// keeps. Throws InvalidArgument where it has let go of some of them.
  static void keep_part(const Tensor& weight, core::ElementRange part);
  /// The elements of keep_part() lie in other memory now (core::WeightInParts), unchanged: they are
  /// watched there.
  static void moved(const Tensor& weight);
  /// Keeps the exact values, or the part of them that is here, in the other form.
  static void change_storage(const Tensor& weight, MasterStorage storage);
  /// Keeps them in another place. Does nothing where they lie there. Every other function that
  /// makes a master anew makes it in memory beside the weight. Not for remainders of a GPU's
  /// weights.
  static void keep_in(const Tensor& weight, const StatePlace& place);

  MasterStorage storage() const;
  /// The elements that it is of; nothing: all of the weight's.
  const std::optional<core::ElementRange>& part() const { return part_; }
  /// f32, or the i16 remainder; laid out like the weight, or [n] of its part; where keep_in() says.
  /// For reading.
  const Tensor& tensor() const { return tensor_; }
  /// The exact value, or its part, in f32: tensor() itself, or put together from the remainder.
  Tensor value(const Tensor& weight) const;
  /// The same for those who write both, as update kernels do; they end with weight_written().
  TensorView view_to_write() const;
  /// Writes a value (any floating dtype, of its shape) into both.
  void write(const Tensor& weight, const Tensor& value);
  /// Writes the value of a part() into the master, and the whole weight, rounded as on the other
  /// ranks. f32 [n]; the weight's dtype and shape.
  void write_part(const Tensor& weight, const Tensor& value, const Tensor& rounded);
  /// The weight and the master agree as they are now.
  void weight_written(const Tensor& weight);

 private:
  class Watch;
  void follow(const Tensor& weight);
  void keep(const Tensor& weight, Tensor master);
  void write_tensor(const Tensor& exact, const TensorView& weight_part);
  TensorView in_part(const TensorView& x) const;

  Tensor tensor_;
  std::optional<core::ElementRange> part_;
  StatePlace place_;                        // of tensor_
  std::shared_ptr<core::WriteGuard> seal_;  // of tensor_
  std::shared_ptr<Watch> watch_;            // of the weight, since the two agreed
};

/// An update wrote all of these, and their masters where they have some. Some may share a storage.
void weights_written(const std::vector<Tensor>& weights);

/// The exact value of any tensor in f32: its master (sharing the memory), weight and remainder put
/// together, an f32 tensor itself, a half one without a master widened. Throws Unsupported where
/// this rank has a part of it only.
Tensor master_value(const Tensor& weight);

/// The same in memory beside the tensor, whose value it may become.
Tensor master_value_beside(const Tensor& weight);

/// The same for others to keep: what is not a tensor's own memory (a half one's) is not written by
/// them. A kernel that would, throws InvalidArgument, since the tensor would not follow.
Tensor exported_value(const Tensor& weight);
/// The same for a state: a Shard where this rank has a part only, with the rounded weight where
/// that is whole.
StateDict::Value exported_state(const Tensor& weight);
/// Whether a shard is what exported_state() gives: of the part that this rank has.
bool is_stored_part(const Tensor& weight, const core::Shard& shard);

/// Writes a value (any floating dtype, of its shape) into a weight and its master. keep_exact: a
/// half weight that has no master gets one where the value does not fit it (waits for the device).
void write_weight(const Tensor& weight, const Tensor& value, bool keep_exact);
/// Gives a weight the master that write_weight() will make, where it will, and leaves its value: of
/// several weights none is written where memory is short.
void prepare_to_write(const Tensor& weight, const StateDict::Value& value, bool keep_exact);
/// What exported_state() gave. Throws InvalidArgument for a shard of another part.
void write_weight(const Tensor& weight, const StateDict::Value& value, bool keep_exact);

}  // namespace cairn::kernels
