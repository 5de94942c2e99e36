// How many rows a model names right.
#pragma once

#include <algorithm>
#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/data/loader.h"
#include "cairn/data/mean.h"
#include "cairn/data/samplers.h"
#include "cairn/nn/nn.h"

namespace support {

/// Share of rows whose argmax is the label. logits [N, C], labels [N].
inline double accuracy(const cairn::Tensor& logits, const cairn::Tensor& labels) {
  using namespace cairn;
  const autograd::NoGradGuard no_grad;
  const Tensor right = autograd::compare(kernels::BinaryOp::eq, autograd::argmax(logits), labels);
  return autograd::mean(autograd::to(right, DType::f32)).item();
}

/// Share of rows of which the label is among the k highest. logits [N, C], labels [N].
inline double top_accuracy(const cairn::Tensor& logits, const cairn::Tensor& labels,
                           std::int64_t k) {
  using namespace cairn;
  const autograd::NoGradGuard no_grad;
  const Tensor highest = autograd::topk(logits, std::min(k, logits.size(1))).index;
  const Tensor each = autograd::reshape(labels, {labels.size(0), 1});
  const Tensor right = autograd::compare(kernels::BinaryOp::eq, highest, each);
  return autograd::sum(autograd::to(right, DType::f32)).item() /
         static_cast<double>(labels.size(0));
}

/// Over all samples of `test`, the top_accuracy of each k; each process looks at its part of them.
/// Trains on afterwards.
inline std::vector<double> test_accuracies(cairn::nn::Module& model,
                                           const cairn::data::Dataset& test,
                                           const cairn::World& world,
                                           const cairn::data::LoaderOptions& options,
                                           const std::vector<std::int64_t>& tops) {
  using namespace cairn;
  const autograd::NoGradGuard no_grad;
  model.eval();
  data::DistributedSampler sampler(test.size(), {.world = world, .shuffle = false, .exact = true});
  data::DataLoader loader(test, sampler, options);
  std::vector<data::Mean> means(tops.size());
  for (const data::Batch& batch : loader) {
    const Tensor logits = model(batch.inputs);
    for (std::size_t i = 0; i < tops.size(); ++i) {
      means[i].add(top_accuracy(logits, batch.labels, tops[i]), static_cast<double>(batch.size()));
    }
  }
  model.train();
  std::vector<double> accuracies;
  for (const data::Mean& mean : means) accuracies.push_back(mean.over(world, "test accuracy"));
  return accuracies;
}

inline double test_accuracy(cairn::nn::Module& model, const cairn::data::Dataset& test,
                            const cairn::World& world, const cairn::data::LoaderOptions& options) {
  return test_accuracies(model, test, world, options, {1})[0];
}

}  // namespace support
