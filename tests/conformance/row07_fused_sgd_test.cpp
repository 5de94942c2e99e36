// Row 7: the cases of row 6 with FusedSGD and materialize_master_grads on and off; 1344 cases. In
// Cairn gradients of half parameters are f32 (materialized) where the arena has f32 slots.
#include "multi_model.h"

namespace cairn::conformance {
namespace {

class ApexRow7FusedSgd : public testing::TestWithParam<std::tuple<Scenario, bool>> {};

TEST_P(ApexRow7FusedSgd, EveryCase) {
  const auto& [scenario, materialize] = GetParam();
  const std::vector<Case> cases = cases_of(scenario);
  EXPECT_EQ(static_cast<int>(cases.size()), scenario.cases);
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    CaseRun(scenario, c, materialize).train();
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, ApexRow7FusedSgd,
                         testing::Combine(testing::ValuesIn(scenarios()), testing::Bool()),
                         [](const auto& info) {
                           return core::str(std::get<0>(info.param).name,
                                            std::get<1>(info.param) ? "_f32" : "_half");
                         });

}  // namespace
}  // namespace cairn::conformance
