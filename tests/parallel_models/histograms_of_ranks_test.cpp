// Histograms are of the gradients that a step will use: what ranks have not reduced yet, they
// reduce.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/observe/run.h"
#include "cairn/parallel/distributed.h"
#include "checkpointing/temporary_folder.h"
#include "parallel/ranks.h"

namespace cairn::parallel {
namespace {

TEST(HistogramsOfRanks, AreOfReducedGradients) {
  const checkpointing::TemporaryFolder folder;
  test::run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(1);
    nn::Sequential model(nn::Linear(3, 2, {.bias = false}));
    DistributedDataParallel ddp(model, group);
    observe::Run run(folder / ("rank-" + std::to_string(group.rank())), {.histogram_every = 2});
    const Tensor weight = model.parameters()[0].tensor;
    const auto backward = [&] {
      const auto apart = ddp.no_sync();
      autograd::backward(autograd::sum(ddp(Tensor::full({1, 3}, 1.0 + group.rank()))));
      run.histograms(model.parameters());
    };
    backward();  // of step 1, which has none
    EXPECT_EQ(weight.grad().to_vector(), std::vector<double>(6, 1.0 + group.rank()));
    run.step({{"loss", 0}});
    model.clear_grad();
    backward();
    EXPECT_EQ(weight.grad().to_vector(), std::vector<double>(6, 1.5));
  });
}

}  // namespace
}  // namespace cairn::parallel
