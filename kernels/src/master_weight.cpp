#include "cairn/kernels/master_weight.h"

#include <memory>
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

}  // namespace

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
    master->tensor_ = empty_beside(weight, DType::i16);
    split_master(exact, weight, master->tensor_);
  } else {
    copy(exact, weight);
    exact.storage()->set_category(core::MemoryCategory::optimizer_state);
    master->tensor_ = std::move(exact);
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
    master->tensor_ = copy_beside(weight, weight, DType::f32);
  } else {
    master->tensor_ = empty_beside(weight, DType::i16);
    fill(master->tensor_, 0.0);
  }
  master->weight_written(weight);
  weight.attachments().master = master;
  return *master;
}

void MasterWeight::drop(const Tensor& weight) {
  if (exists(weight)) weight.attachments().master = nullptr;
}

void MasterWeight::weight_written(const Tensor& weight) {
  storage_ = weight.storage().get();
  version_ = weight.storage()->version();
}

void MasterWeight::write(const Tensor& weight, const Tensor& value) {
  if (storage() == MasterStorage::f32) {
    copy(value, tensor_);
    copy(tensor_, weight);
  } else {
    split_master(copy_beside(weight, value, DType::f32), weight, tensor_);
  }
  weight.storage()->bump_version();
  weight_written(weight);
}

void MasterWeight::follow(const Tensor& weight) {
  const core::Storage* storage_now = weight.storage().get();
  if (storage_ == storage_now && version_ == storage_now->version()) return;
  if (tensor_.device() != weight.device()) {
    tensor_ = copy_beside(weight, tensor_, tensor_.dtype());
  } else if (storage() == MasterStorage::f32) {
    reconcile_master(weight, tensor_);
  } else {
    fill(tensor_, 0.0);  // which elements were written is not known
  }
  weight_written(weight);
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
