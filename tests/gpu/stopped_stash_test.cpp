// A GPU that refuses a kernel or memory while gradients move into their sums: the next try adds
// each once, or nobody uses what may have been added.
#include <gmock/gmock.h>

#include "cairn/optim/sgd.h"
#include "gpu/refusal.h"
#include "optim/support.h"

namespace cairn::test {
namespace {

/// Sums of one stash; a long list takes memory of its own.
struct Training {
  explicit Training(std::size_t count) : optimizer(parameters_of(count), {.lr = 0.5}) {
    write(1);
    (void)optimizer.stash();
    write(3);
  }
  static NamedTensors parameters_of(std::size_t count) {
    NamedTensors all;
    while (all.size() < count)
      all.push_back(optim::make_parameter(core::str("p", all.size()), {20}, 2, DType::f32, kGpu));
    return all;
  }
  void write(std::uint64_t seed) { optim::write_gradients(optimizer.groups()[0].parameters, seed); }
  std::vector<Values> step() {
    (void)optimizer.step();
    return everything(optimizer.groups()[0].parameters, optimizer);
  }

  optim::FusedSGD optimizer;
};

/// Whether the second stash threw.
bool refused(std::size_t count, bool memory, std::uint64_t nth,
             const std::vector<Values>& expected) {
  Training training(count);
  const std::string thrown = message_of<core::Error>([&] {
    const Refusal refusal(memory, nth);
    (void)training.optimizer.stash();
  });
  if (thrown == "nothing thrown") return false;
  std::vector<Values> seen;
  const std::string again = message_of<core::Error>([&] {
    (void)training.optimizer.stash();
    seen = training.step();
  });
  if (again == "nothing thrown") {
    EXPECT_EQ(seen, expected) << thrown;
  } else {
    EXPECT_THAT(again, testing::HasSubstr("expected a whole gradient")) << thrown;
  }
  return true;
}

class StoppedStash : public testing::TestWithParam<bool> {};

TEST_P(StoppedStash, AddsOnceOrIsKnown) {
  const bool memory = GetParam();
  const std::size_t count = memory ? 150 : 3;
  Training undisturbed(count);
  (void)undisturbed.optimizer.stash();
  const std::vector<Values> expected = undisturbed.step();
  std::uint64_t nth = 1;
  while (refused(count, memory, nth, expected)) ++nth;
  EXPECT_GT(nth, 1u);
}
INSTANTIATE_TEST_SUITE_P(Of, StoppedStash, testing::Bool(),
                         [](const auto& info) { return info.param ? "AMemory" : "AKernel"; });

}  // namespace
}  // namespace cairn::test
