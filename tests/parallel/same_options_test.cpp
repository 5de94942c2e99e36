// Ranks whose options differ are told which one does.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ddp_support.h"
#include "ranks.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::InvalidArgument;
using test::expect_error;
using test::loss_of;
using test::run_threads;
using test::Tower;

/// Divided by other factors, or compressed by other hooks, their parameters would go apart in
/// silence.
TEST(DdpOptions, MustBeTheSameOnAllRanks) {
  struct Pair {
    DistributedOptions first, others;
    std::string of_first, of_others;
  };
  const auto function = [] {
    return communication_hook([](const GradientBucket&, const ProcessGroup&) {});
  };
  struct Own final : CommunicationHook {
    void reduce(const GradientBucket& /*bucket*/, const ProcessGroup& /*group*/) override {}
  };
  const Pair pairs[] = {
      {{}, {.first_bucket_bytes = 1}, "first_bucket_bytes 1048576", "first_bucket_bytes 1"},
      {{}, {.bucket_bytes = 1}, "bucket_bytes 26214400", "bucket_bytes 1"},
      {{.delay_allreduce = true}, {}, "delay_allreduce true", "delay_allreduce false"},
      {{.allreduce_always_fp32 = true},
       {},
       "allreduce_always_fp32 true",
       "allreduce_always_fp32 false"},
      {{.average = false}, {}, "average false", "average true"},
      {{},
       {.gradient_predivide_factor = 2.0},
       "gradient_predivide_factor 1",
       "gradient_predivide_factor 2"},
      {{.trigger_parameters = {"l0.bias"}},
       {.trigger_parameters = {"l0.weight"}},
       "trigger_parameters 'l0.bias'",
       "trigger_parameters 'l0.weight'"},
      {{}, {.num_allreduce_streams = 2}, "num_allreduce_streams 1", "num_allreduce_streams 2"},
      {{.hook = function()}, {}, "hook a function", "hook none"},
      {{.hook = compress_to(DType::f16)},
       {.hook = compress_to(DType::bf16)},
       "hook compress_to(f16)",
       "hook compress_to(bf16)"},
      {{.hook = function()}, {.hook = std::make_shared<Own>()}, "hook a function", "hook a hook"},
      {{.hook = power_sgd({.rank = 4})},
       {.hook = power_sgd({.rank = 4, .seed = 1})},
       "hook power_sgd(rank 4, start_step 1000, min_compression_rate 2, error_feedback true, "
       "warm_start true, seed 0)",
       "seed 1)"},
      {{.find_unused_parameters = true},
       {},
       "find_unused_parameters true",
       "find_unused_parameters false"},
      {{}, {.static_graph = true}, "static_graph false", "static_graph true"},
      {{}, {.broadcast_buffers = true}, "broadcast_buffers false", "broadcast_buffers true"}};
  run_threads(3, [&](ProcessGroup& group) {
    Tower tower(1);
    for (const Pair& pair : pairs) {
      const DistributedOptions& own = group.rank() == 0 ? pair.first : pair.others;
      expect_error<InvalidArgument>([&] { DistributedDataParallel(tower, group, own); },
                                    {"expected the same options and ",
                                     " on every rank, got " + pair.of_first + " on rank 0 and ",
                                     pair.of_others + " on rank 1"});
    }
  });
}

/// Objects of their own that are described alike are one hook.
TEST(DdpOptions, HooksOfOneKindAreTheSame) {
  run_threads(2, [](ProcessGroup& group) {
    for (const auto& make :
         {+[] { return compress_to(DType::f16); }, +[] { return power_sgd(); }}) {
      Tower tower(1);
      DistributedDataParallel ddp(tower, group, {.hook = make()});
      autograd::backward(loss_of(ddp, 1));
    }
  });
}

}  // namespace
}  // namespace cairn::parallel
