#include "cairn/kernels/master_weight.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

namespace {

void check_can_have(const Tensor& weight, MasterStorage storage) {
  CAIRN_CHECK(core::is_half(weight.dtype()), "master",
              "expected a half parameter to keep a master of, got '", weight.name(), "' of ",
              weight.dtype());
  CAIRN_CHECK(storage == MasterStorage::f32 || weight.dtype() == DType::bf16, "master",
              "expected bf16 parameters for masters stored as remainders, got '", weight.name(),
              "' of ", weight.dtype(), " (MasterStorage::f32)");
}

/// Nobody else uses its memory, and it is laid out like the weight.
bool can_become_master(const Tensor& exact, const Tensor& weight) {
  return exact.dtype() == DType::f32 && exact.unique() && exact.device() == weight.device() &&
         same_layout(exact, weight);
}

/// Waits for the device.
bool fits_exactly(const Tensor& value, const Tensor& weight) {
  const Tensor rounded = copy_beside(weight, value, weight.dtype());
  const Tensor widened = copy_beside(weight, rounded, DType::f32);
  const Tensor exact = copy_beside(weight, value, DType::f32);
  const Tensor differs = empty_with_layout_of(weight, DType::boolean);
  binary(BinaryOp::ne, exact, widened, differs);
  copy(differs, exact);
  Tensor count = Tensor::empty({1}, DType::f32, weight.device());
  const std::int64_t n = exact.numel();
  const TensorView flat(exact.raw_data(), {n}, {1}, DType::f32, exact.device());
  reduce(ReductionKind::sum, flat, count);
  return count.item() == 0.0;
}

/// Of whoever looks after the memory: nobody is told of its writes.
TensorView own_view(const Tensor& x) {
  TensorView view = x;
  view.version = nullptr;
  return view;
}

/// Copies; between a GPU and pinned memory the host waits, because it writes there next, or lets
/// go.
void copy_and_wait(const TensorView& from, const TensorView& to) {
  copy_by_blocks(from, to);
  if (from.device == to.device) return;
  core::Stream::current(from.device.is_cuda() ? from.device : to.device).synchronize();
}

/// A view's elements on this device: a copy, unless they are there.
Tensor brought_to(Device device, const TensorView& x) {
  if (x.device == device) return Tensor::wrap(x);
  const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
  Tensor copied = Tensor::empty_strided(x.shape, x.strides, x.dtype, device);
  core::copy_bytes(x, copied);
  return copied;
}

/// What a master of this part is of.
TensorView own_part(const Tensor& weight, const std::optional<core::ElementRange>& part) {
  TensorView view = part ? core::part_of_weight(weight, *part) : weight.view();
  view.version = nullptr;
  return view;
}

/// Refuses writes to the exact value of a half weight.
class Seal : public core::WriteGuard {
 public:
  explicit Seal(std::string weight) : weight_(std::move(weight)) {}
  void before_write() override {
    core::fail<core::InvalidArgument>(
        "master", "expected a write to the half weight ", weight_.empty() ? "" : weight_ + " ",
        "itself, got one to its f32 value, which the weight would not follow "
        "(kernels::write_weight(weight, value) writes both, load_state_dict() those of a model; "
        "kernels::copy() makes a copy of one's own)");
  }

 private:
  std::string weight_;
};

}  // namespace

/// What becomes of a weight between two moments in which its master agrees with it.
class MasterWeight::Watch : public core::WriteGuard {
 public:
  Watch(const Tensor& weight, const TensorView& part, bool keeps_former)
      : storage_(weight.storage()), view_(part), keeps_former_(keeps_former) {}

  void before_write() override {
    const std::lock_guard lock(mutex_);
    remember();
  }
  void pointer_given() override {
    const std::lock_guard lock(mutex_);
    has_pointer_ = true;
    remember();
  }
  void agree(const Tensor& weight) {
    const std::lock_guard lock(mutex_);
    version_ = weight.storage()->version();
    is_remembered_ = false;
    if (!has_pointer_) former_ = Tensor();
    if (has_pointer_) remember();
  }

  bool is_of(const Tensor& weight) const { return storage_.lock() == weight.storage(); }
  bool agrees(const Tensor& weight) const {
    const std::lock_guard lock(mutex_);
    return is_of(weight) && !has_pointer_ && version_ == weight.storage()->version();
  }
  /// What the weight was; undefined where that is not known.
  Tensor former() const {
    const std::lock_guard lock(mutex_);
    return is_remembered_ ? former_ : Tensor();
  }

 private:
  /// Into the same memory each time, while somebody has a pointer: a graph may have recorded it.
  void remember() {
    const auto storage = storage_.lock();
    if (!keeps_former_ || is_remembered_ || !storage || storage->version() != version_) return;
    if (!former_.defined()) {
      const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
      former_ = Tensor::empty_strided(view_.shape, view_.strides, view_.dtype, view_.device);
    }
    copy(view_, former_);
    is_remembered_ = true;
  }

  std::weak_ptr<core::Storage> storage_;
  TensorView view_;
  bool keeps_former_;
  mutable std::mutex mutex_;
  std::uint64_t version_ = 0;
  bool has_pointer_ = false;
  bool is_remembered_ = false;
  Tensor former_;
};

MasterWeight* MasterWeight::peek(const Tensor& weight) {
  const core::TensorAttachments* attachments = weight.attachments_or_null();
  return attachments == nullptr ? nullptr : static_cast<MasterWeight*>(attachments->master.get());
}

MasterWeight* MasterWeight::of(const Tensor& weight) {
  MasterWeight* master = peek(weight);
  if (master != nullptr) master->follow(weight);
  return master;
}

MasterStorage MasterWeight::storage() const {
  return tensor_.dtype() == DType::i16 ? MasterStorage::remainder : MasterStorage::f32;
}

MasterWeight& MasterWeight::assign(const Tensor& weight, Tensor exact, MasterStorage storage) {
  check_can_have(weight, storage);
  CAIRN_CHECK(exact.defined() && exact.shape() == weight.shape(), "master",
              "expected a value of shape ", weight.shape(), ", got ",
              exact.defined() ? core::str(exact.shape()) : "an undefined tensor");
  if (!can_become_master(exact, weight)) exact = copy_beside(weight, exact, DType::f32);
  auto master = std::make_shared<MasterWeight>();
  if (storage == MasterStorage::remainder) {
    Tensor remainder = empty_with_layout_of(weight, DType::i16);
    split_master(exact, own_view(weight), remainder);
    master->keep(weight, std::move(remainder));
  } else {
    copy(exact, own_view(weight));
    exact.storage()->set_category(core::MemoryCategory::optimizer_state);
    master->keep(weight, std::move(exact));
  }
  weight.storage()->bump_version();
  master->weight_written(weight);
  weight.attachments().master = master;
  return *master;
}

MasterWeight& MasterWeight::make(const Tensor& weight, MasterStorage storage) {
  check_can_have(weight, storage);
  auto master = std::make_shared<MasterWeight>();
  if (const auto* parts = core::WeightInParts::of(weight)) master->part_ = parts->range();
  const DType dtype = storage == MasterStorage::f32 ? DType::f32 : DType::i16;
  Tensor exact;
  if (master->part_) {
    const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
    exact = Tensor::empty({master->part_->size()}, dtype, weight.device());
  } else {
    exact = empty_with_layout_of(weight, dtype);
  }
  if (storage == MasterStorage::f32) {
    copy(own_part(weight, master->part_), exact);
  } else {
    fill(exact, 0.0);
  }
  master->keep(weight, std::move(exact));
  master->weight_written(weight);
  weight.attachments().master = master;
  return *master;
}

void MasterWeight::drop(const Tensor& weight) {
  if (exists(weight)) weight.attachments().master = nullptr;
}

void MasterWeight::keep_part(const Tensor& weight, core::ElementRange part) {
  MasterWeight* master = of(weight);
  if (master == nullptr || master->part_ == part) return;
  CAIRN_CHECK(!master->part_, "master", "expected the master of '", weight.name(),
              "' of the same elements as before, ", master->part_->begin, " to ",
              master->part_->end, ", got ", part.begin, " to ", part.end,
              " (save the training state, and resume it in the other form)");
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  const Tensor kept = Tensor::empty({part.size()}, master->tensor_.dtype(), weight.device());
  copy(core::part_of(own_view(master->tensor_), part), kept);
  auto own = std::make_shared<MasterWeight>();
  own->part_ = part;
  own->keep(weight, kept);
  own->weight_written(weight);
  weight.attachments().master = own;
}

void MasterWeight::moved(const Tensor& weight) {
  MasterWeight* master = peek(weight);
  if (master == nullptr) return;
  master->watch_ = nullptr;  // of where it was
  master->weight_written(weight);
}

void MasterWeight::change_storage(const Tensor& weight, MasterStorage storage) {
  MasterWeight* master = of(weight);
  if (master->storage() == storage) return;
  if (!master->part_) {
    assign(weight, master->value(weight), storage);
    return;
  }
  check_can_have(weight, storage);
  Tensor exact = master->value(weight);
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  if (exact.device() != weight.device()) {
    const Tensor beside = Tensor::empty(exact.shape(), DType::f32, weight.device());
    copy_and_wait(exact, beside);
    exact = beside;
  }
  const DType dtype = storage == MasterStorage::f32 ? DType::f32 : DType::i16;
  master->keep(weight, Tensor::empty(exact.shape(), dtype, weight.device()));
  master->watch_ = nullptr;  // of the other form
  master->write_tensor(exact, own_part(weight, master->part_));
  weight.storage()->bump_version();
  master->weight_written(weight);
}

void MasterWeight::keep_in(const Tensor& weight, const StatePlace& place) {
  MasterWeight* master = of(weight);
  if (master == nullptr || master->place_ == place) return;
  const Tensor former = master->tensor_;
  const bool any_files =
      former.nbytes() >= core::kLeastInFile && master->place_.folder != place.folder;
  if (any_files || former.device() != place.home_of(weight.device())) {
    const Tensor placed =
        empty_in(place, former.shape(), former.strides(), former.dtype(), weight.device());
    copy_and_wait(former, own_view(placed));
    master->keep(weight, placed);
    master->weight_written(weight);
  }
  master->place_ = place;
}

Tensor MasterWeight::value(const Tensor& weight) const {
  if (storage() == MasterStorage::f32) return tensor_;
  const core::MemoryCategoryGuard category(core::MemoryCategory::optimizer_state);
  Tensor exact =
      Tensor::empty_strided(tensor_.shape(), tensor_.strides(), DType::f32, weight.device());
  join_master(own_part(weight, part_), tensor_, exact);
  return exact;
}

/// What the master is of.
TensorView MasterWeight::in_part(const TensorView& x) const {
  return part_ ? core::part_of(x, *part_) : x;
}

TensorView MasterWeight::view_to_write() const {
  return own_view(tensor_);
}

void MasterWeight::keep(const Tensor& weight, Tensor master) {
  tensor_ = std::move(master);
  place_ = {};
  seal_ = std::make_shared<Seal>(weight.name());
  tensor_.storage()->version_counter().add_guard(seal_);
}

void MasterWeight::weight_written(const Tensor& weight) {
  tensor_.storage()->bump_version();
  if (!watch_ || !watch_->is_of(weight)) {
    watch_ = std::make_shared<Watch>(weight, own_part(weight, part_),
                                     storage() == MasterStorage::remainder);
    weight.storage()->version_counter().add_guard(watch_);
  }
  watch_->agree(weight);
}

/// Both from the exact value of what the master is of.
void MasterWeight::write_tensor(const Tensor& exact, const TensorView& weight_part) {
  if (storage() == MasterStorage::remainder) {
    split_master(exact, weight_part, view_to_write());
  } else {
    copy(exact, view_to_write());
    copy(tensor_, weight_part);
  }
}

void MasterWeight::write(const Tensor& weight, const Tensor& value) {
  const Tensor exact =
      storage() == MasterStorage::f32 && !part_ ? value : copy_beside(weight, value, DType::f32);
  if (!part_) {
    write_tensor(exact, own_view(weight));
  } else if (core::WeightInParts::of(weight) != nullptr) {
    write_tensor(exact.alias(in_part(own_view(exact))), own_part(weight, part_));
  } else if (storage() == MasterStorage::f32) {
    copy(exact, own_view(weight));
    copy(in_part(own_view(exact)), view_to_write());
  } else {  // rounded on every rank as where the part is
    const Tensor remainder = empty_with_layout_of(weight, DType::i16);
    split_master(exact, own_view(weight), remainder);
    copy(in_part(own_view(remainder)), view_to_write());
  }
  weight.storage()->bump_version();
  weight_written(weight);
}

void MasterWeight::write_part(const Tensor& weight, const Tensor& value, const Tensor& rounded) {
  if (core::WeightInParts::of(weight) == nullptr) copy(rounded, own_view(weight));
  write_tensor(value, own_part(weight, part_));
  weight.storage()->bump_version();
  weight_written(weight);
}

void MasterWeight::follow(const Tensor& weight) {
  if (watch_->agrees(weight)) return;
  if (tensor_.device() != place_.home_of(weight.device())) {
    const StatePlace place = place_;
    const Tensor moved =
        empty_in(place, tensor_.shape(), tensor_.strides(), tensor_.dtype(), weight.device());
    copy_and_wait(tensor_, own_view(moved));
    keep(weight, moved);
    place_ = place;
  } else if (storage() == MasterStorage::f32) {
    reconcile_master(brought_to(tensor_.device(), own_part(weight, part_)), view_to_write());
  } else if (watch_->is_of(weight) && watch_->former().defined()) {
    reconcile_remainder(own_part(weight, part_), watch_->former(), view_to_write());
  } else {
    fill(view_to_write(), 0.0);  // which elements were written is not known
  }
  weight_written(weight);
}

void weights_written(const std::vector<Tensor>& weights) {
  for (const Tensor& weight : weights) weight.storage()->bump_version();
  for (const Tensor& weight : weights) {
    if (auto* master = MasterWeight::peek(weight)) master->weight_written(weight);
  }
}

Tensor master_value(const Tensor& weight) {
  const MasterWeight* master = MasterWeight::of(weight);
  if (master == nullptr) {
    return weight.dtype() == DType::f32 ? weight.detach() : copy_beside(weight, weight, DType::f32);
  }
  if (master->part()) {
    core::fail<core::Unsupported>(
        "master", "expected the exact value of all of '", weight.name(),
        "', got this rank's part of it: its optimizer's state is sharded (a training state holds "
        "all of it: save, and resume without ShardedDataParallel)");
  }
  return master->value(weight);
}

Tensor master_value_beside(const Tensor& weight) {
  const Tensor value = master_value(weight);
  const bool is_beside = value.device() == weight.device() && !core::lies_in_file(value);
  return is_beside ? value : copy_beside(weight, value, DType::f32);
}

namespace {

/// A value that was made for a state: who writes into it is told that no weight hears of that.
Tensor sealed(const Tensor& value, const MasterWeight* master) {
  static const auto seal = std::make_shared<Seal>("");
  const bool is_master = master != nullptr && master->tensor().same(value);
  if (!is_master) value.storage()->version_counter().add_guard(seal);
  return value;
}

/// Nothing: this rank has the whole.
std::optional<core::ElementRange> stored_part(const Tensor& weight) {
  if (const auto* parts = core::WeightInParts::of(weight)) return parts->range();
  const MasterWeight* master = MasterWeight::peek(weight);
  return master == nullptr ? std::nullopt : master->part();
}

}  // namespace

Tensor exported_value(const Tensor& weight) {
  if (!core::is_half(weight.dtype())) return weight.detach();
  const Tensor value = master_value(weight);
  return sealed(value, MasterWeight::peek(weight));
}

StateDict::Value exported_state(const Tensor& weight) {
  const MasterWeight* master = MasterWeight::of(weight);
  const core::WeightInParts* parts = core::WeightInParts::of(weight);
  if (master != nullptr && master->part()) {
    return core::Shard{sealed(master->value(weight), master), weight.shape(), master->part()->begin,
                       parts == nullptr ? weight.detach() : Tensor()};
  }
  if (parts == nullptr) return exported_value(weight);
  core::part_of_weight(weight, parts->range());  // nobody writes the whole meanwhile
  const Tensor& part = parts->part();
  const bool is_f32 = part.dtype() == DType::f32;
  return core::Shard{is_f32 ? part.detach() : copy_beside(part, part, DType::f32), weight.shape(),
                     parts->range().begin};
}

bool is_stored_part(const Tensor& weight, const core::Shard& shard) {
  const auto own = stored_part(weight);
  return own && shard.whole == weight.shape() && shard.begin == own->begin &&
         shard.tensor.numel() == own->size() && core::is_floating(shard.tensor.dtype());
}

namespace {

/// Of a weight that ranks hold in parts.
void write_part(const Tensor& weight, const Tensor& value, bool keep_exact) {
  const Tensor& part = core::WeightInParts::of(weight)->part();
  const bool keeps = keep_exact && core::is_half(weight.dtype()) && value.numel() > 0;
  if (keeps && !fits_exactly(value, part)) {
    return MasterWeight::make(weight).write_part(weight, value, {});
  }
  copy(value, core::part_of_weight(weight, *stored_part(weight)));
  weight.storage()->bump_version();
}

}  // namespace

void write_weight(const Tensor& weight, const StateDict::Value& value, bool keep_exact) {
  if (const auto* whole = std::get_if<Tensor>(&value)) {
    return write_weight(weight, *whole, keep_exact);
  }
  const auto* shard = std::get_if<core::Shard>(&value);
  const bool in_parts = core::WeightInParts::of(weight) != nullptr;
  const bool fits =
      shard != nullptr && is_stored_part(weight, *shard) && (in_parts || shard->rounded.defined());
  CAIRN_CHECK(fits, "master", "expected the value of '", weight.name(),
              "' or the shard of it that this rank keeps, got another");
  MasterWeight* master = MasterWeight::of(weight);
  if (master == nullptr) return write_part(weight, shard->tensor, keep_exact);
  master->write_part(weight, shard->tensor, shard->rounded);
}

void write_weight(const Tensor& weight, const Tensor& value, bool keep_exact) {
  MasterWeight* master = MasterWeight::of(weight);
  if (master != nullptr) return master->write(weight, value);
  if (const auto* parts = core::WeightInParts::of(weight)) {
    const Tensor exact = copy_beside(weight, value, DType::f32, core::MemoryCategory::workspace);
    return write_part(weight, exact.alias(core::part_of(exact, parts->range())), keep_exact);
  }
  if (keep_exact && core::is_half(weight.dtype()) && !fits_exactly(value, weight)) {
    MasterWeight::assign(weight, copy_beside(weight, value, DType::f32));
    return;
  }
  copy(value, weight);
  weight.storage()->bump_version();
}

void prepare_to_write(const Tensor& weight, const StateDict::Value& value, bool keep_exact) {
  const auto* whole = std::get_if<Tensor>(&value);
  if (whole == nullptr || !keep_exact || !core::is_half(weight.dtype())) return;
  if (core::WeightInParts::of(weight) != nullptr || MasterWeight::exists(weight)) return;
  if (!fits_exactly(*whole, weight)) MasterWeight::make(weight);
}

}  // namespace cairn::kernels
