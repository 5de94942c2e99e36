#include "cuda/optimizer_update.cuh"

#include <type_traits>
#include <variant>

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/master.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class Options>
void update_by(const UpdateList& list, const Options& options) {
  const auto formula = math::formula_of<float>(options);
  using Formula = std::remove_const_t<decltype(formula)>;
  const Queue queue(Options::kName, list.device);
  const DeviceTable table(queue, slots_of(list));
  if (table.table().chunk_count == 0) return;
  const DeviceScalars scalars(queue, list, options);
  launch(queue, {table.table().chunk_count, kThreads}, update_kernel<Formula>, table.table(),
         scalars.list(), formula);
}
void update_by(const UpdateList& list, const AdamOptions& options) {
  options.device.defined() ? update_on_device(list, options)
                           : update_by<AdamOptions>(list, options);
}
void update_by(const UpdateList& list, const LambOptions& options) {
  update_lamb(list, options);
}

}  // namespace

void CudaBackend::update(const UpdateList& list, const UpdateRule& rule) const {
  std::visit([&](const auto& options) { update_by(list, options); }, rule);
}

void CudaBackend::join_master(View weight, View remainder, View out) const {
  if (out.numel() == 0) return;
  const Queue queue("join_master", out.device);
  launch(queue, grid_for(out.numel()), join_master_kernel, out.numel(),
         weight.as<const core::BFloat16>(), remainder.as<const std::int16_t>(), out.as<float>());
}

void CudaBackend::split_master(View in, View weight, View remainder) const {
  if (in.numel() == 0) return;
  const Queue queue("split_master", in.device);
  launch(queue, grid_for(in.numel()), split_master_kernel, in.numel(), in.as<const float>(),
         weight.as<core::BFloat16>(), remainder.as<std::int16_t>());
}

void CudaBackend::reconcile_master(View weight, View master) const {
  const std::int64_t n = master.numel();
  if (n == 0) return;
  const Queue queue("reconcile_master", master.device);
  if (weight.dtype == DType::f16) {
    launch(queue, grid_for(n), reconcile_master_kernel<core::Half>, n,
           weight.as<const core::Half>(), master.as<float>());
  } else {
    launch(queue, grid_for(n), reconcile_master_kernel<core::BFloat16>, n,
           weight.as<const core::BFloat16>(), master.as<float>());
  }
}

}  // namespace cairn::kernels
