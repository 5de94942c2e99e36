#include "ddp/likely_mistakes.h"

#include <algorithm>
#include <utility>

#include "cairn/core/log.h"
#include "cairn/kernels/hash_tensors.h"
#include "group/listing.h"
#include "reducer/names.h"

namespace cairn::parallel {
namespace {

/// Empty: the model is where the rank's tensors belong, or on several devices.
std::string misplacement(const nn::Module& model, const ProcessGroup& group) {
  const NamedTensors parameters = model.parameters();
  if (parameters.empty()) return "";
  const Device device = parameters[0].tensor.device(), own = group.device("");
  const bool together = std::all_of(
      parameters.begin(), parameters.end(),
      [&](const NamedTensor& parameter) { return parameter.tensor.device() == device; });
  if (!together || device == own || (device.is_cpu() && own.is_cpu())) return "";
  return core::str("rank ", group.rank(), "'s on ", device, " instead of ", own);
}

}  // namespace

void warn_of_devices(const nn::Module& model, const ProcessGroup& group) {
  std::string all;
  for (const std::string& text :
       group.exchange(misplacement(model, group), "the model's devices")) {
    if (!text.empty()) all += (all.empty() ? "" : ", ") + text;
  }
  if (all.empty() || group.rank() != 0) return;
  log::warn("the model may be on a wrong device: {} (model.to(group.device()))", all);
}

void FirstBatch::see(const Tensor& x) {
  if (compared_ || !digest_.empty() || x.numel() == 0 || !x.view().is_dense()) return;
  const auto hashes = kernels::hash_tensors({x});
  digest_ = digest(core::str(x.shape(), " ", x.dtype(), " ", hashes[0]));
}

void FirstBatch::warn_once_of_same(const ProcessGroup& group) {
  if (std::exchange(compared_, true)) return;
  const auto digests = group.exchange(digest_, "the first batch");
  if (digest_.empty() || !all_equal(digests) || group.rank() != 0) return;
  log::warn(
      "all {} ranks were given the same first batch: is the sampler a DistributedSampler "
      "with .world = group.world()?",
      group.world_size());
}

}  // namespace cairn::parallel
