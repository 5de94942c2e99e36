#include "reducer/local_checks.h"

#include <map>
#include <utility>

namespace cairn::parallel {

constexpr std::size_t kPasses = 16;

void LocalChecks::begin_pass() {
  passes_.emplace_back();
  if (passes_.size() > kPasses) passes_.pop_front();
}

void LocalChecks::check(std::vector<Name> names, const std::vector<TensorView>& gradients) {
  if (core::is_half(gradients[0].dtype) || gradients[0].dtype == DType::f32)
    passes_.back().push_back({std::move(names), kernels::check_tensors(gradients)});
}

std::vector<core::NonFinite> LocalChecks::take() {
  std::vector<std::vector<Name>> names;
  std::vector<kernels::PendingCheck> checks;
  for (std::vector<Bucket>& pass : std::exchange(passes_, {})) {
    for (Bucket& bucket : pass) {
      checks.push_back(bucket.check);
      names.push_back(std::move(bucket.names));
    }
  }
  const auto found = kernels::PendingCheck::read(checks);
  std::map<Name, core::NonFinite> sums;
  for (std::size_t b = 0; b < names.size(); ++b) {
    for (std::size_t k = 0; k < found[b].size(); ++k) {
      const kernels::TensorCheck& check = found[b][k];
      if (check.nonfinite == 0) continue;
      core::NonFinite& sum = sums[names[b][k]];
      sum.parameter = names[b][k].second;
      sum.inf += check.nonfinite - check.nan;
      sum.nan += check.nan;
    }
  }
  std::vector<core::NonFinite> all;
  all.reserve(sums.size());
  for (const auto& [name, sum] : sums) all.push_back(sum);
  return all;
}

}  // namespace cairn::parallel
