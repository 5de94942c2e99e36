#include "gradient_segments.h"

#include <algorithm>

#include "cairn/core/error.h"

namespace cairn::amp {

namespace {

template <class T>
bool contains(const std::vector<T>& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// Of the gradients in an optimizer's slots.
struct SlotScales {
  const core::GradientScale* first = nullptr;  // null: it has none there
  bool are_one = true;                         // not where each rank lacked another loss
};

SlotScales scales_of(const optim::Optimizer& optimizer) {
  SlotScales scales;
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const NamedTensor& parameter : group.parameters) {
      const core::GradientSlot* slot = parameter.tensor.gradient_slot_or_null();
      if (slot == nullptr || !parameter.tensor.requires_grad() || !slot->holds_gradient()) continue;
      if (scales.first == nullptr) scales.first = &slot->scale();
      scales.are_one = scales.are_one && slot->scale().factor == scales.first->factor;
    }
  }
  return scales;
}

}  // namespace

GradientSegments::GradientSegments(const std::vector<optim::Optimizer*>& optimizers) {
  for (optim::Optimizer* optimizer : optimizers) optimizers_.push_back({optimizer, nullptr});
}

std::size_t GradientSegments::index_of(const optim::Optimizer& optimizer, const char* where) const {
  const auto found = std::find_if(optimizers_.begin(), optimizers_.end(),
                                  [&](const Optimizer& o) { return o.optimizer == &optimizer; });
  CAIRN_CHECK(found != optimizers_.end(), where, "expected one of the ", optimizers_.size(),
              " optimizers that were given to amp::initialize, got another");
  return static_cast<std::size_t>(found - optimizers_.begin());
}

void GradientSegments::stash(std::size_t index) {
  Optimizer& entry = optimizers_[index];
  optim::PendingReport moved = entry.optimizer->stash();
  if (entry.open) entry.open->pending.push_back(std::move(moved));
  entry.open = nullptr;
  entry.left = false;
}

Segment& GradientSegments::begin(int loss_id, double scale,
                                 const std::vector<std::size_t>& optimizers) {
  auto found = std::find_if(segments_.begin(), segments_.end(), [&](const SegmentPtr& s) {
    return s->loss_id == loss_id && s->optimizers == optimizers;
  });
  if (found == segments_.end()) {
    auto segment = std::make_shared<Segment>();
    segment->loss_id = loss_id;
    segment->scale = scale;
    segment->optimizers = optimizers;
    found = segments_.insert(found, std::move(segment));
  }
  for (const std::size_t index : optimizers) {
    Optimizer& entry = optimizers_[index];
    entry.optimizer->prepare();
    if (entry.left || (entry.open && entry.open != *found)) stash(index);
    entry.open = *found;
  }
  return **found;
}

std::vector<SegmentPtr> GradientSegments::take_segments_of(
    const std::vector<std::size_t>& optimizers) {
  const auto concerned = [&](const SegmentPtr& segment) {
    return std::any_of(optimizers.begin(), optimizers.end(),
                       [&](std::size_t o) { return contains(segment->optimizers, o); });
  };
  std::vector<SegmentPtr> taken;
  std::copy_if(segments_.begin(), segments_.end(), std::back_inserter(taken), concerned);
  std::erase_if(segments_, concerned);
  return taken;
}

GradientSegments::Resolved GradientSegments::resolve(const std::vector<std::size_t>& optimizers,
                                                     const optim::StepOptions& options) {
  const bool reads = options.check || options.max_gradient_norm > 0 || options.error_if_nonfinite ||
                     std::any_of(optimizers.begin(), optimizers.end(), [&](std::size_t index) {
                       return optimizers_[index].optimizer->needs_report();
                     });
  Resolved resolved;
  std::vector<optim::PendingReport> pending;
  std::vector<SegmentPtr> sources;  // whose gradients each of them checked
  for (const std::size_t index : optimizers) {
    Optimizer& entry = optimizers_[index];
    const SlotScales scales = scales_of(*entry.optimizer);
    const bool sums = entry.optimizer->has_stash() || !scales.are_one;
    const core::GradientScale* scale = sums ? nullptr : scales.first;
    const bool is_of_nobody = !entry.open && !entry.left;
    if (is_of_nobody && scale != nullptr) begin(0, 1.0, {index});
    const SegmentPtr segment = entry.open;
    resolved.scales.push_back(scale != nullptr ? scale->factor : 1.0);
    if (sums) stash(index);
    if (!reads) continue;
    pending.push_back(entry.optimizer->begin_check(options.norm_type));
    sources.push_back(sums ? nullptr : segment);
  }
  resolved.segments = take_segments_of(optimizers);
  resolved.reports.resize(optimizers.size());
  if (!reads) return resolved;

  for (const SegmentPtr& segment : resolved.segments) {
    for (const std::size_t index : segment->optimizers) {  // those that step later
      const Optimizer& entry = optimizers_[index];
      if (entry.open != segment || contains(optimizers, index)) continue;
      if (entry.optimizer->has_stash()) {
        stash(index);
      } else {
        segment->pending.push_back(entry.optimizer->begin_own_check(options.norm_type));
      }
    }
    pending.insert(pending.end(), segment->pending.begin(), segment->pending.end());
    sources.insert(sources.end(), segment->pending.size(), segment);
    segment->pending.clear();
  }
  std::vector<optim::GradientReport> reports = optim::PendingReport::read(pending);
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (!sources[i]) continue;
    std::vector<optim::NonFinite>& all = sources[i]->nonfinite;
    all.insert(all.end(), reports[i].nonfinite.begin(), reports[i].nonfinite.end());
  }
  reports.resize(optimizers.size());
  resolved.reports = std::move(reports);
  return resolved;
}

void GradientSegments::reset() {
  segments_.clear();
  for (Optimizer& entry : optimizers_) {
    entry.open = nullptr;
    entry.poisoned = entry.left = false;
    entry.optimizer->clear_grad();
  }
}

void GradientSegments::leave(const std::set<std::size_t>& optimizers) {
  const auto ended = [&](const SegmentPtr& open) { return !contains(segments_, open); };
  for (const std::size_t index : optimizers) {
    Optimizer& entry = optimizers_[index];
    if (entry.open && !ended(entry.open)) continue;
    entry.open = nullptr;
    entry.left = true;
  }
}

void GradientSegments::end(const std::vector<std::size_t>& optimizers) {
  for (const std::size_t index : optimizers) {
    optimizers_[index].open = nullptr;
    optimizers_[index].left = false;
  }
}

void GradientSegments::forget(const std::vector<std::size_t>& optimizers) {
  take_segments_of(optimizers);
  end(optimizers);
}

}  // namespace cairn::amp
