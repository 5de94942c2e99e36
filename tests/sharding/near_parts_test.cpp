// Weights that a smaller group of ranks keeps from a forward to its backward (reshard_within).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/ranks.h"
#include "sharding/side_by_side.h"

namespace cairn {
namespace {

using test::expect_bits_of_plain;
using test::inputs;
using test::loss_of;
using test::Recomputed;
using test::stage_3;

// Whoever gathers from whom: parts of a smaller group, between steps those of all.
TEST(WeightsInParts, MayStayInASmallerGroup) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "of CPUs";
  std::vector<parallel::ShardedOptions> forms(5, stage_3());
  forms[1].shard_within = 4, forms[1].prefetch = 3;
  forms[2].units = {"tied"}, forms[2].keep_whole = test::kHidden;
  forms[3].distributed.find_unused_parameters = true;
  forms[4].reshard_within = 1;
  for (auto& options : forms) {
    if (options.reshard_within == 0) options.reshard_within = 2;
    test::run_threads(4, [&](parallel::ProcessGroup& group) {
      const auto run = [&](auto& /*net*/, auto& ddp, std::uint64_t step) {
        const Tensor first = loss_of(ddp(inputs(group, 20 + step)));
        const Tensor second = loss_of(ddp(inputs(group, 40 + step)));
        {
          const autograd::NoGradGuard no_grad;
          (void)ddp(inputs(group, 60 + step));
        }
        {
          const auto no_sync = ddp.no_sync();
          autograd::backward(first);
          autograd::backward(second);
        }
        autograd::backward(loss_of(ddp(inputs(group, step))));
        (void)ddp(inputs(group, 80 + step));  // has no backward
      };
      expect_bits_of_plain<test::OddNet>(group, run, options);
    });
  }
  test::run_threads(4, [](parallel::ProcessGroup& group) {
    parallel::ShardedOptions options = stage_3();
    options.reshard_within = 2;
    expect_bits_of_plain<Recomputed>(
        group,
        [&](auto&, auto& ddp, std::uint64_t step) {
          autograd::backward(loss_of(ddp(inputs(group, step))));
        },
        options);
  });
}

}  // namespace
}  // namespace cairn
