// Several models, optimizers and losses; 672 cases over opt levels, ways of zeroing, one or
// two scalers, and an inf in one gradient of one backward: only the optimizers that the loss was
// given skip, and everything else follows the reference. One host read a step.
#include "multi_model.h"

namespace cairn::conformance {
namespace {

class SeveralLosses : public testing::TestWithParam<Scenario> {};

TEST_P(SeveralLosses, SkipOnlyTheOptimizersOfWhatOverflowed) {
  const std::vector<Case> cases = cases_of(GetParam());
  EXPECT_EQ(static_cast<int>(cases.size()), GetParam().cases);
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    CaseRun(GetParam(), c, false).train();
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, SeveralLosses, testing::ValuesIn(scenarios()),
                         [](const auto& info) { return std::string(info.param.name); });

// The same with FusedSGD and materialize_master_grads on and off; 1344 cases. In Cairn gradients of
// half parameters are f32 (materialized) where the arena has f32 slots.
class SeveralLossesWithFusedSgd : public testing::TestWithParam<std::tuple<Scenario, bool>> {};

TEST_P(SeveralLossesWithFusedSgd, SkipOnlyTheOptimizersOfWhatOverflowed) {
  const auto& [scenario, materialize] = GetParam();
  const std::vector<Case> cases = cases_of(scenario);
  EXPECT_EQ(static_cast<int>(cases.size()), scenario.cases);
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    CaseRun(scenario, c, materialize).train();
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, SeveralLossesWithFusedSgd,
                         testing::Combine(testing::ValuesIn(scenarios()), testing::Bool()),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).name,
                                            std::get<1>(info.param) ? "_f32" : "_half");
                         });

}  // namespace
}  // namespace cairn::conformance
