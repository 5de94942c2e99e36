// How many rows a model names right.
#pragma once

#include <vector>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/data/loader.h"
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

/// Over all samples of `test`, nn::Accuracy of each of `tops`; each process looks at its part of
/// them. Trains on afterwards.
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
  std::vector<nn::Accuracy> each(tops.begin(), tops.end());
  for (const data::Batch& batch : loader) {
    const Tensor logits = model(batch.inputs);
    for (nn::Accuracy& one : each) one.add(logits, batch.labels);
  }
  model.train();
  std::vector<double> accuracies;
  for (const nn::Accuracy& one : each) accuracies.push_back(one.over(world));
  return accuracies;
}

inline double test_accuracy(cairn::nn::Module& model, const cairn::data::Dataset& test,
                            const cairn::World& world, const cairn::data::LoaderOptions& options) {
  return test_accuracies(model, test, world, options, {1})[0];
}

}  // namespace support
