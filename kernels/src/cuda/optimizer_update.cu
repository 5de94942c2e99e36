#include "cuda/optimizer_update.cuh"

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/master.cuh"
#include "cuda/optimizer_list.cuh"

namespace cairn::kernels {

using namespace cuda;  // NOLINT: this file is that namespace's host side

namespace {

template <class Rule, class Options>
void update(const char* op, const std::vector<UpdateEntry>& entries, const Rule& rule,
            const Options& options) {
  const Queue queue(op, entries.front().weight.device);
  const DeviceTable table(queue, slots_of(entries));
  if (table.table().chunk_count == 0) return;
  const DeviceScalars scalars(queue, entries, options);
  launch(queue, {table.table().chunk_count, kThreads}, update_kernel<Rule>, table.table(),
         scalars.list(), rule);
}

}  // namespace

void CudaBackend::adam_update(const std::vector<UpdateEntry>& entries,
                              const AdamOptions& options) const {
  update("adam_update", entries, math::Adam<float>(options), options);
}

void CudaBackend::sgd_update(const std::vector<UpdateEntry>& entries,
                             const SgdOptions& options) const {
  update("sgd_update", entries, math::Sgd<float>(options), options);
}

void CudaBackend::adagrad_update(const std::vector<UpdateEntry>& entries,
                                 const AdagradOptions& options) const {
  update("adagrad_update", entries, math::Adagrad<float>(options), options);
}

void CudaBackend::novograd_update(const std::vector<UpdateEntry>& entries,
                                  const NovoGradOptions& options) const {
  update("novograd_update", entries, math::NovoGrad<float>(options), options);
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
