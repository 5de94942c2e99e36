#include "cairn/optim/master.h"

#include "cairn/core/error.h"
#include "cairn/kernels/optimizer_update.h"
#include "layout.h"

namespace cairn::optim {

namespace {

void check_can_have(const Tensor& parameter, MasterStorage storage) {
  const core::GradMeta& meta = parameter.meta();
  CAIRN_CHECK(core::is_half(parameter.dtype()), "master",
              "expected a half parameter to keep a master of, got '", meta.name, "' of ",
              parameter.dtype());
  CAIRN_CHECK(storage == MasterStorage::f32 || parameter.dtype() == DType::bf16, "master",
              "expected bf16 parameters for masters stored as remainders, got '", meta.name,
              "' of ", parameter.dtype(), " (MasterStorage::f32)");
}

/// Nobody else uses its memory, and it is laid out like the parameter.
bool can_become_master(const Tensor& exact, const Tensor& parameter) {
  return exact.dtype() == DType::f32 && exact.unique() && exact.device() == parameter.device() &&
         same_layout(exact, parameter);
}

}  // namespace

void set_master(const Tensor& parameter, Tensor exact, MasterStorage storage) {
  check_can_have(parameter, storage);
  CAIRN_CHECK(exact.defined() && exact.shape() == parameter.shape(), "master",
              "expected a value of shape ", parameter.shape(), ", got ",
              exact.defined() ? core::str(exact.shape()) : "an undefined tensor");
  core::GradMeta& meta = parameter.meta();
  if (!can_become_master(exact, parameter)) exact = copy_beside(parameter, exact, DType::f32);
  if (storage == MasterStorage::remainder) {
    const Tensor remainder = empty_beside(parameter, DType::i16);
    kernels::split_master(exact, parameter, remainder);
    meta.remainder = std::make_shared<Tensor>(remainder);
    meta.master = nullptr;
  } else {
    kernels::copy(exact, parameter);
    exact.storage()->set_category(core::MemoryCategory::optimizer_state);
    meta.master = std::make_shared<Tensor>(std::move(exact));
    meta.remainder = nullptr;
  }
  parameter.storage()->bump_version();
}

Tensor master_value(const Tensor& parameter) {
  const core::GradMeta* meta = parameter.meta_or_null();
  if (meta != nullptr && meta->master) return *meta->master;
  if (meta != nullptr && meta->remainder) {
    Tensor whole = empty_beside(parameter, DType::f32);
    kernels::join_master(parameter, *meta->remainder, whole);
    return whole;
  }
  return parameter.dtype() == DType::f32 ? parameter.detach()
                                         : copy_beside(parameter, parameter, DType::f32);
}

}  // namespace cairn::optim
