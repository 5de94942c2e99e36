#include "reducer/bucket_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace cairn::parallel {
namespace {

using Places = std::vector<std::size_t>;

class Planner {
 public:
  Planner(const std::vector<Gradient>& gradients, const ReducerOptions& options)
      : gradients_(gradients), options_(options) {}

  std::vector<PlannedBucket> plan() {
    std::map<std::size_t, Places> runs;
    std::map<std::tuple<DeviceType, int, DType>, Places> scattered;
    for (std::size_t i = 0; i < gradients_.size(); ++i) runs[gradients_[i].run].push_back(i);
    for (auto& [first, run] : runs) {
      const TensorView& x = gradients_[first].view;
      if (run.size() > 1) {
        sort(run, [&](std::size_t i) { return gradients_[i].offset; });
        cut(run, true);
      } else {
        scattered[{x.device.type, x.device.index, x.dtype}].push_back(first);
      }
    }
    for (auto& [kind, places] : scattered) {
      sort(places, [&](std::size_t i) { return gradients_[i].expected; });
      cut(places, false);
    }
    const auto last = [&](const PlannedBucket& b) {
      return gradients_[b.gradients.back()].expected;
    };
    std::stable_sort(buckets_.begin(), buckets_.end(),
                     [&](const auto& a, const auto& b) { return last(a) < last(b); });
    return std::move(buckets_);
  }

 private:
  template <class Key>
  static void sort(Places& places, const Key& key) {
    std::stable_sort(places.begin(), places.end(),
                     [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  }
  std::int64_t bytes_of(std::size_t i) const {
    return static_cast<std::int64_t>(gradients_[i].view.nbytes());
  }
  /// From the beginning of one to the end of another one of its run.
  std::int64_t extent(std::size_t first, std::size_t last) const {
    return gradients_[last].offset + bytes_of(last) - gradients_[first].offset;
  }

  /// A bucket ends where the next gradient would not fit, and at a trigger.
  void cut(const Places& places, bool neighbours) {
    std::int64_t cap = cap_of(options_.first_bucket_bytes);
    for (std::size_t first = 0; first < places.size();) {
      std::size_t end = first + 1;
      std::int64_t bytes = bytes_of(places[first]);
      while (end < places.size() && !triggers(places[end - 1])) {
        const std::size_t next = places[end];
        bytes = neighbours ? extent(places[first], next) : bytes + bytes_of(next);
        if (bytes > cap) break;
        ++end;
      }
      using Offset = Places::difference_type;
      add({places.begin() + static_cast<Offset>(first), places.begin() + static_cast<Offset>(end)},
          neighbours || end - first == 1);
      first = end;
      cap = cap_of(options_.bucket_bytes);
    }
  }

  void add(Places places, bool one_slice) {
    PlannedBucket bucket;
    const TensorView& first = gradients_[places.front()].view;
    if (one_slice) {
      const std::int64_t elements = extent(places.front(), places.back()) /
                                    static_cast<std::int64_t>(core::size_of(first.dtype));
      bucket.slice = TensorView(first.data, {elements}, first.dtype, first.device);
    }
    sort(places, [&](std::size_t i) { return gradients_[i].expected; });
    bucket.name = places.size() == 1 ? "gradients " + gradients_[places[0]].name
                                     : "gradients " + gradients_[places.front()].name + " ... " +
                                           gradients_[places.back()].name;
    bucket.gradients = std::move(places);
    buckets_.push_back(std::move(bucket));
  }

  std::int64_t cap_of(std::int64_t bytes) const {
    return options_.delay_allreduce ? std::numeric_limits<std::int64_t>::max() : bytes;
  }
  bool triggers(std::size_t place) const {
    const auto& names = options_.trigger_parameters;
    return std::find(names.begin(), names.end(), gradients_[place].name) != names.end();
  }

  const std::vector<Gradient>& gradients_;
  const ReducerOptions& options_;
  std::vector<PlannedBucket> buckets_;
};

}  // namespace

void find_runs(std::vector<Gradient>& gradients, std::int64_t gap_bytes) {
  Places places(gradients.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  const auto begin = [&](std::size_t i) {
    return static_cast<const char*>(gradients[i].view.data);
  };
  const auto alike = [&](std::size_t a, std::size_t b) {
    return gradients[a].view.dtype == gradients[b].view.dtype &&
           gradients[a].view.device == gradients[b].view.device;
  };
  std::sort(places.begin(), places.end(),
            [&](std::size_t a, std::size_t b) { return std::less<>()(begin(a), begin(b)); });
  for (std::size_t k = 0; k < places.size(); ++k) {
    Gradient& gradient = gradients[places[k]];
    gradient.run = places[k];
    gradient.offset = 0;
    if (k == 0 || !alike(places[k - 1], places[k])) continue;
    const Gradient& before = gradients[places[k - 1]];
    const std::int64_t gap =
        begin(places[k]) - begin(places[k - 1]) - static_cast<std::int64_t>(before.view.nbytes());
    if (gap < 0 || gap > gap_bytes) continue;
    gradient.run = before.run;
    gradient.offset = begin(places[k]) - begin(before.run);
  }
}

std::vector<PlannedBucket> plan_buckets(const std::vector<Gradient>& gradients,
                                        const ReducerOptions& options) {
  return Planner(gradients, options).plan();
}

}  // namespace cairn::parallel
