// How well classes are named, counted over the samples of all ranks: exact, whatever each has.
//
//   nn::Accuracy top1, top5(5);
//   nn::ConfusionMatrix confusion(10);
//   for (const data::Batch& batch : loader) {
//     const Tensor logits = model(batch.inputs);
//     for (nn::Accuracy* one : {&top1, &top5}) one->add(logits, batch.labels);
//     confusion.add(logits, batch.labels);
//   }
//   const double everywhere = top1.over(group.world());
//
// logits [..., C] of any floating dtype, labels [...] i64 on the same device. A sample whose label
// is `ignored` counts for nothing. add() waits for the device: it copies the highest classes, not
// the logits, to the host. With a DistributedSampler that is exact no sample counts twice.
//
// Perplexity is std::exp of a data::Mean of losses, each with its number of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/tensor.h"
#include "cairn/core/world.h"

namespace cairn::nn {

inline constexpr std::int64_t kIgnoredLabel = -100;  // as cross_entropy's

/// The share of samples whose label is among the `top` highest logits; of equal ones the first
/// count as higher, and NaN as higher than all.
class Accuracy {
 public:
  explicit Accuracy(std::int64_t top = 1, std::int64_t ignored = kIgnoredLabel);
  /// Throws InvalidArgument for shapes that do not fit and for labels that are no class.
  void add(const Tensor& logits, const Tensor& labels);
  std::int64_t samples() const { return samples_; }  // here
  /// Of all ranks' samples, from 0 to 1. A collective, for ranks without samples too. Throws
  /// InvalidArgument, on every rank, where none has any.
  double over(const World& world = {}) const;

 private:
  std::int64_t top_, ignored_;
  std::int64_t right_ = 0, samples_ = 0;
};

/// How often each class was taken for each.
class ConfusionMatrix {
 public:
  explicit ConfusionMatrix(std::int64_t classes, std::int64_t ignored = kIgnoredLabel);
  void add(const Tensor& logits, const Tensor& labels);
  /// Of all ranks. A collective.
  ConfusionMatrix over(const World& world) const;

  std::int64_t classes() const { return classes_; }
  std::int64_t count(std::int64_t label, std::int64_t prediction) const;
  Tensor counts() const;  // [label, prediction] i64, on the CPU
  // NaN where there is nothing to divide by.
  double accuracy() const;
  double recall(std::int64_t label) const;          // of the samples of a class
  double precision(std::int64_t prediction) const;  // of those that were taken for it
  double f1(std::int64_t label) const;              // 2 / (1 / recall + 1 / precision)

 private:
  std::int64_t& at(std::int64_t label, std::int64_t prediction);
  std::int64_t classes_, ignored_;
  std::vector<std::int64_t> counts_;
};

}  // namespace cairn::nn
