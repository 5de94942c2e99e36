// The same training with weights in parts and with DistributedDataParallel, side by side.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cairn/checkpointing/recompute.h"
#include "sharding/training.h"
#include "support/step.h"

namespace cairn::test {

inline parallel::ShardedOptions stage_3(parallel::ShardedOptions options = {}) {
  options.stage = parallel::ZeroStage::parameters;
  return options;
}

inline bool has_memory(const Tensor& weight) {
  return weight.storage()->has_memory();
}

/// f(net, ddp, step) for the sharded net and the same one under DistributedDataParallel: their
/// weights agree.
template <class Net, class F>
void expect_bits_of_plain(const parallel::ProcessGroup& group, F&& f,
                          const parallel::ShardedOptions& options = stage_3()) {
  Net net, same;
  parallel::ShardedDataParallel sharded(net, group, options);
  parallel::DistributedDataParallel plain(same, group, options.distributed);
  optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
  for (std::uint64_t step = 0; step < 4; ++step) {
    f(net, sharded, step);
    f(same, plain, step);
    expect_applied(optimizer.step());
    expect_applied(expected.step());
    const auto whole = sharded.gather_parameters();
    ASSERT_EQ(difference_of_weights(net, same), "") << step;
  }
}

/// Blocks that run their forward again in the backward.
class Recomputed : public nn::Module {
 public:
  Recomputed() {
    manual_seed(4);
    for (int i = 0; i < 3; ++i)
      blocks_.push_back(add_module(
          core::str("block", i),
          nn::Sequential(nn::Linear(kInputs, 300), nn::Tanh(), nn::Linear(300, kInputs))));
  }
  std::string kind() const override { return "Recomputed"; }
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (const auto& block : blocks_)
      y = checkpointing::checkpoint([block](const Tensor& in) { return (*block)(in); }, y);
    return y;
  }

 private:
  std::vector<std::shared_ptr<nn::Sequential>> blocks_;
};

}  // namespace cairn::test
