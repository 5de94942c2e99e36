#include "reducer/local_checks.h"

#include <map>
#include <utility>

namespace cairn::parallel {
namespace {

constexpr std::size_t kPasses = 16;

}  // namespace

void LocalChecks::begin_pass() {
  passes_.emplace_back();
  if (passes_.size() > kPasses) passes_.pop_front();
}

void LocalChecks::check(const std::vector<std::size_t>& parameters,
                        const std::vector<TensorView>& gradients) {
  const bool can_be_checked = core::is_half(gradients[0].dtype) || gradients[0].dtype == DType::f32;
  if (can_be_checked) passes_.back().push_back({parameters, kernels::check_tensors(gradients)});
}

std::vector<core::NonFinite> LocalChecks::take(const std::vector<std::string>& names) {
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
  std::map<std::size_t, core::NonFinite> by_parameter;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t k = 0; k < found[b].size(); ++k) {
      const kernels::TensorCheck& check = found[b][k];
      if (check.nonfinite == 0) continue;
      const std::size_t parameter = buckets[b].parameters[k];
      core::NonFinite& sum = by_parameter[parameter];
      sum.parameter = names[parameter];
      sum.inf += check.nonfinite - check.nan;
      sum.nan += check.nan;
    }
  }
  std::vector<core::NonFinite> all;
  all.reserve(by_parameter.size());
  for (auto& [parameter, sum] : by_parameter) all.push_back(std::move(sum));
  return all;
}

}  // namespace cairn::parallel
