// Mean: a number's mean over the samples of all ranks, gathered batch by batch: a loss, an
// accuracy.
//
// Each value counts by its weight, such as the batch's samples, so that short batches and ranks
// with fewer samples count as what they are. With a DistributedSampler that is exact no sample
// counts twice, and the mean is that of one process that reads everything.
//
//   data::Mean accuracy;
//   for (const data::Batch& batch : loader) {
//     accuracy.add(hit_rate(model(batch.inputs), batch.labels), batch.size());
//   }
//   const double everywhere = accuracy.over(group.world(), "test accuracy");
#pragma once

#include <string_view>

#include "cairn/core/world.h"

namespace cairn::data {

class Mean {
 public:
  /// Throws InvalidArgument for a weight that is negative or not finite. A value of weight 0 counts
  /// for nothing, whatever it is.
  void add(double value, double weight = 1.0);
  /// Of this rank's values. Throws InvalidArgument without any.
  double here() const;
  /// Of all ranks' values: the same bits on every rank, added in rank order. A collective, for
  /// ranks without values too. Throws InvalidArgument, on every rank, where none has any.
  double over(const World& world, std::string_view name) const;

  double sum() const { return sum_; }          // of value * weight, here
  double weights() const { return weights_; }  // here

 private:
  double sum_ = 0.0, weights_ = 0.0;
};

}  // namespace cairn::data
