#include "ddp/local_checks.h"

#include <map>

namespace cairn::parallel {
namespace {

constexpr std::size_t kPasses = 16;

bool can_be_checked(const PlannedBucket& bucket) {
  return core::is_half(bucket.gradients.dtype) || bucket.gradients.dtype == DType::f32;
}

}  // namespace

void LocalChecks::begin_pass() {
  passes_.emplace_back();
  if (passes_.size() > kPasses) passes_.pop_front();
}

void LocalChecks::check(const optim::GradientArena& arena, const PlannedBucket& bucket) {
  if (!can_be_checked(bucket)) return;
  Bucket checked;
  std::vector<TensorView> gradients;
  const auto& buffer = arena.buffers()[bucket.buffer];
  for (std::size_t s = bucket.first_slot; s < bucket.last_slot; ++s) {
    const auto& slot = buffer.slots[s];
    checked.parameters.push_back(slot.parameter);
    gradients.push_back(buffer.data.view().slice(0, slot.offset, slot.offset + slot.numel));
  }
  checked.check = kernels::check_tensors(gradients);
  passes_.back().push_back(std::move(checked));
}

std::vector<optim::NonFinite> LocalChecks::take(const optim::GradientArena& arena) {
  std::vector<Bucket> buckets;
  std::vector<kernels::PendingCheck> checks;
  for (std::vector<Bucket>& pass : passes_) {
    for (Bucket& bucket : pass) {
      checks.push_back(bucket.check);
      buckets.push_back(std::move(bucket));
    }
  }
  passes_.clear();
  const auto found = kernels::PendingCheck::read(checks);
  std::map<std::size_t, optim::NonFinite> by_parameter;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t k = 0; k < found[b].size(); ++k) {
      const kernels::TensorCheck& check = found[b][k];
      if (check.nonfinite == 0) continue;
      const std::size_t parameter = buckets[b].parameters[k];
      optim::NonFinite& sum = by_parameter[parameter];
      sum.parameter = arena.parameters()[parameter].name;
      sum.inf += check.nonfinite - check.nan;
      sum.nan += check.nan;
    }
  }
  std::vector<optim::NonFinite> all;
  all.reserve(by_parameter.size());
  for (auto& [parameter, sum] : by_parameter) all.push_back(std::move(sum));
  return all;
}

}  // namespace cairn::parallel
