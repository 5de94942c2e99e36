#include "reducer/local_checks.h"

#include <map>
#include <utility>

namespace cairn::parallel {

constexpr std::size_t kPasses = 16;

void LocalChecks::begin_pass() {
  passes_.emplace_back();
  if (passes_.size() > kPasses) passes_.pop_front();
}

void LocalChecks::check(std::vector<std::string> names, const std::vector<TensorView>& gradients) {
  const bool can_be_checked = core::is_half(gradients[0].dtype) || gradients[0].dtype == DType::f32;
  if (can_be_checked)
    passes_.back().push_back({std::move(names), kernels::check_tensors(gradients)});
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
  std::map<std::string, core::NonFinite> by_name;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t k = 0; k < found[b].size(); ++k) {
      const kernels::TensorCheck& check = found[b][k];
      if (check.nonfinite == 0) continue;
      core::NonFinite& sum = by_name[buckets[b].names[k]];
      sum.inf += check.nonfinite - check.nan;
      sum.nan += check.nan;
    }
  }
  std::vector<core::NonFinite> all;
  for (const std::string& name : names) {
    const auto found_of = by_name.find(name);
    if (found_of != by_name.end())
      all.push_back({name, found_of->second.inf, found_of->second.nan});
  }
  return all;
}

}  // namespace cairn::parallel
