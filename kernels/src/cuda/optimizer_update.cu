#include "cuda/optimizer_update.cuh"

#include <type_traits>
#include <variant>

#include "cuda/cuda_backend.h"
#include "cuda/lamb_parts.cuh"
#include "cuda/launch.cuh"
#include "cuda/map.cuh"
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
void update_by(const UpdateList& list, const LambOptions& options) {
  const Queue queue(LambOptions::kName, list.device);
  const DeviceScalars scalars(queue, list, options);
  update_lamb(queue, list, options,
              LambOfHost{scalars.list(), math::Lamb<float>(options), options.lr});
}

}  // namespace

void CudaBackend::update(const UpdateList& list, const UpdateRule& rule,
                         const DeviceStep& device) const {
  if (device.defined()) return update_on_device(list, rule, device);
  std::visit([&](const auto& options) { update_by(list, options); }, rule);
}

void CudaBackend::lamb_moments(const UpdateList& list, const LambOptions& options,
                               TensorCheck* checks) const {
  const Queue queue(LambOptions::kName, list.device);
  const DeviceTable kept(queue, slots_of(list));
  const Table& table = kept.table();
  const Buffer<LambNorms> parts(queue, table.chunk_count);
  const DeviceScalars scalars(queue, list, options);
  const LambOfHost rule{scalars.list(), math::Lamb<float>(options), options.lr};
  if (table.chunk_count > 0) {
    launch(queue, {table.chunk_count, kThreads}, lamb_moments_kernel<LambOfHost>, table, rule,
           parts.data());
  }
  launch(queue, {table.slot_count, 32}, lamb_checks_kernel, table,
         static_cast<const LambNorms*>(parts.data()), checks);
}

void CudaBackend::lamb_weights(const UpdateList& list, const LambOptions& options) const {
  const Queue queue(LambOptions::kName, list.device);
  const DeviceTable kept(queue, slots_of(list));
  const Table& table = kept.table();
  if (table.chunk_count == 0) return;
  const DeviceScalars scalars(queue, list, options);
  const Buffer<float> steps(queue, table.slot_count);
  launch(queue, {1, kThreads}, lamb_steps_of_host_kernel, scalars.list(), table.slot_count,
         steps.data());
  const LambOfHost rule{scalars.list(), math::Lamb<float>(options), options.lr};
  launch(queue, {table.chunk_count, kThreads}, lamb_weights_kernel<LambOfHost>, table, rule,
         static_cast<const float*>(steps.data()));
}

void CudaBackend::join_master(View weight, View remainder, View out) const {
  const Queue queue("join_master", out.device);
  map<float, core::BFloat16, std::int16_t>(queue, JoinMaster{}, out, {&weight, &remainder});
}

void CudaBackend::split_master(View in, View weight, View remainder) const {
  const std::int64_t n = in.numel();
  if (n == 0) return;
  const Queue queue("split_master", in.device);
  auto* const high = weight.as<core::BFloat16>();
  auto* const low = remainder.as<std::int16_t>();
  launch(queue, grid_for(ceil_div(n, pack_width<core::BFloat16>)), split_master_kernel, n,
         packs_aligned(in.as<float>(), high, low), in.as<const float>(), high, low);
}

void CudaBackend::reconcile_master(View weight, View master) const {
  const Queue queue("reconcile_master", master.device);
  const auto by = [&](auto half) {
    using T = decltype(half);
    map<float, T, float>(queue, ReconcileMaster<T>{}, master, {&weight, &master});
  };
  weight.dtype == DType::f16 ? by(core::Half{}) : by(core::BFloat16{});
}

void CudaBackend::reconcile_remainder(View weight, View former, View remainder) const {
  const Queue queue("reconcile_remainder", remainder.device);
  map<std::int16_t, core::BFloat16, core::BFloat16, std::int16_t>(
      queue, ReconcileRemainder{}, remainder, {&weight, &former, &remainder});
}

}  // namespace cairn::kernels
