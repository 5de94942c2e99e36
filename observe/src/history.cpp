#include "history.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace cairn::observe {

void Bucket::add(double value) {
  ++count;
  if (!std::isfinite(value)) {
    ++not_finite;
    return;
  }
  low = std::min(low, value), high = std::max(high, value), sum += value;
}

void Bucket::merge(const Bucket& other) {
  count += other.count, not_finite += other.not_finite, sum += other.sum;
  low = std::min(low, other.low), high = std::max(high, other.high);
}

const Curve* History::find(std::string_view name) const {
  for (const Curve& curve : curves_) {
    if (curve.name == name) return &curve;
  }
  return nullptr;
}

// Null where there are too many.
Curve* History::curve(const std::string& name) {
  for (Curve& curve : curves_) {
    if (curve.name == name) return &curve;
  }
  too_many_names_ = too_many_names_ || curves_.size() == kMostNames;
  if (curves_.size() == kMostNames) return nullptr;
  return &curves_.emplace_back(Curve{.name = name, .last = 0, .buckets = {}});
}

// Twice as many steps in a bucket.
void History::widen() {
  width_ *= 2;
  for (Curve& curve : curves_) {
    std::vector<Bucket> wide;
    for (Bucket& bucket : curve.buckets) {
      bucket.key /= 2;
      if (wide.empty() || wide.back().key != bucket.key)
        wide.push_back(bucket);
      else
        wide.back().merge(bucket);
    }
    curve.buckets = std::move(wide);
  }
}

void History::add(const LayerRecord& record) {
  auto layer = std::find_if(layers_.begin(), layers_.end(),
                            [&](const Layer& one) { return one.last.name == record.name; });
  if (layer == layers_.end()) {
    if (layers_.size() == kMostNames) return;
    layer = layers_.insert(layer, Layer{});
  }
  layer->last = record;
  layer->last.weights.limits.clear();  // the page has octaves
  layer->last.gradients.limits.clear();
  if (record.gradients.count + record.gradients.not_finite == 0) return;
  if (layer->least_step > 0 && record.bits_left >= layer->least_bits) return;
  layer->least_bits = record.bits_left;
  layer->least_step = record.step;
}

void History::note_memory(const StepRecord& record) {
  StepRecord memory{.step = record.step, .time = record.time, .values = {}};
  double bytes = 0;
  for (const auto& [name, value] : record.values) {
    if (!name.starts_with(kMemory) || name == kMemoryPeak) continue;
    memory.values.emplace_back(name, value);
    bytes += value;
  }
  if (memory.values.empty() || bytes <= most_bytes_) return;
  most_bytes_ = bytes;
  most_memory_ = std::move(memory);
}

void History::add(const StepRecord& record) {
  if (first_step_ < 0) first_step_ = record.step;
  last_step_ = record.step;
  while (last_step_ / width_ - first_step_ / width_ >= static_cast<std::int64_t>(kMostBuckets))
    widen();
  for (const auto& [name, value] : record.values) {
    Curve* to = curve(name);
    if (to == nullptr) continue;
    to->last = value;
    const std::int64_t key = record.step / width_;
    if (to->buckets.empty() || to->buckets.back().key != key) to->buckets.push_back({.key = key});
    to->buckets.back().add(value);
  }
  note_memory(record);
}

void History::add(const EventRecord& event) {
  ++counts_[static_cast<std::size_t>(event.kind)];
  if (event.kind == EventKind::checkpoint) last_checkpoint_ = event.time;
  if (events_.size() == kMostEvents) events_.pop_front();
  events_.push_back(event);
}

namespace {

/// In place of the one before of its name.
template <class T>
void put(std::vector<T>& all, T record, std::size_t most) {
  const auto same = std::find_if(all.begin(), all.end(),
                                 [&](const T& before) { return before.name == record.name; });
  if (same != all.end())
    *same = std::move(record);
  else if (all.size() < most)
    all.push_back(std::move(record));
}

}  // namespace

void History::add(ImageRecord record) {
  put(images_, std::move(record), kMostShown);
}

void History::add(TextRecord record) {
  put(texts_, std::move(record), kMostShown);
}

void History::add_summary(const NamedValues& values) {
  for (const auto& value : values) {
    std::erase_if(summary_, [&](const auto& old) { return old.first == value.first; });
    summary_.push_back(value);
  }
}

}  // namespace cairn::observe
