#include "cairn/kernels/master_weight.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/kernels/beside.h"
#include "cairn/kernels/elementwise.h"
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
  const Tensor differs = empty_beside(weight, DType::boolean);
  binary(BinaryOp::ne, exact, widened, differs);
  copy(differs, exact);
  Tensor count = Tensor::empty({1}, DType::f32, weight.device());
  const std::int64_t n = exact.numel();
  const TensorView flat(exact.raw_data(), {n}, {1}, DType::f32, exact.device());
  reduce(ReduceOp::sum, flat, count);
  return count.item() == 0.0;
}

/// Of whoever looks after the memory: nobody is told of its writes.
TensorView own_view(const Tensor& x) {
  TensorView view = x;
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
  Watch(const Tensor& weight, bool keeps_former)
      : storage_(weight.storage()), view_(own_view(weight)), keeps_former_(keeps_former) {}

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
    Tensor remainder = empty_beside(weight, DType::i16);
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
  if (storage == MasterStorage::f32) {
    master->keep(weight, copy_beside(weight, weight, DType::f32));
  } else {
    Tensor remainder = empty_beside(weight, DType::i16);
    fill(remainder, 0.0);
    master->keep(weight, std::move(remainder));
  }
  master->weight_written(weight);
  weight.attachments().master = master;
  return *master;
}

void MasterWeight::drop(const Tensor& weight) {
  if (exists(weight)) weight.attachments().master = nullptr;
}

TensorView MasterWeight::view_to_write() const {
  return own_view(tensor_);
}

void MasterWeight::keep(const Tensor& weight, Tensor master) {
  tensor_ = std::move(master);
  seal_ = std::make_shared<Seal>(weight.name());
  tensor_.storage()->version_counter().add_guard(seal_);
}

void MasterWeight::weight_written(const Tensor& weight) {
  tensor_.storage()->bump_version();
  if (!watch_ || !watch_->is_of(weight)) {
    watch_ = std::make_shared<Watch>(weight, storage() == MasterStorage::remainder);
    weight.storage()->version_counter().add_guard(watch_);
  }
  watch_->agree(weight);
}

void MasterWeight::write(const Tensor& weight, const Tensor& value) {
  if (storage() == MasterStorage::f32) {
    copy(value, view_to_write());
    copy(tensor_, own_view(weight));
  } else {
    split_master(copy_beside(weight, value, DType::f32), own_view(weight), view_to_write());
  }
  weight.storage()->bump_version();
  weight_written(weight);
}

void MasterWeight::follow(const Tensor& weight) {
  if (watch_->agrees(weight)) return;
  if (tensor_.device() != weight.device()) {
    keep(weight, copy_beside(weight, tensor_, tensor_.dtype()));
  } else if (storage() == MasterStorage::f32) {
    reconcile_master(weight, view_to_write());
  } else if (watch_->is_of(weight) && watch_->former().defined()) {
    reconcile_remainder(weight, watch_->former(), view_to_write());
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
  if (master->storage() == MasterStorage::f32) return master->tensor();
  Tensor whole = empty_beside(weight, DType::f32);
  join_master(weight, master->tensor(), whole);
  return whole;
}

Tensor exported_value(const Tensor& weight) {
  static const auto seal = std::make_shared<Seal>("");
  if (!core::is_half(weight.dtype())) return weight.detach();
  Tensor value = master_value(weight);
  const MasterWeight* master = MasterWeight::peek(weight);
  const bool is_master = master != nullptr && master->tensor().same(value);
  if (!is_master) value.storage()->version_counter().add_guard(seal);
  return value;
}

void write_weight(const Tensor& weight, const Tensor& value, bool keep_exact) {
  MasterWeight* master = MasterWeight::of(weight);
  if (master != nullptr) return master->write(weight, value);
  if (keep_exact && core::is_half(weight.dtype()) && !fits_exactly(value, weight)) {
    MasterWeight::assign(weight, copy_beside(weight, value, DType::f32));
    return;
  }
  copy(value, weight);
  weight.storage()->bump_version();
}

}  // namespace cairn::kernels
