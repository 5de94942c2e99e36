// Row 6: several models, optimizers and losses; 672 cases over opt levels, ways of zeroing, one or
// two scalers, and an inf in one gradient of one backward: only the optimizers that the loss was
// given skip, and everything else follows the reference. One host read a step.
#include "multi_model.h"

namespace cairn::conformance {
namespace {

class ApexRow6MultipleModelsOptimizersLosses : public testing::TestWithParam<Scenario> {};

TEST_P(ApexRow6MultipleModelsOptimizersLosses, EveryCase) {
  const std::vector<Case> cases = cases_of(GetParam());
  EXPECT_EQ(static_cast<int>(cases.size()), GetParam().cases);
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    CaseRun(GetParam(), c, false).train();
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, ApexRow6MultipleModelsOptimizersLosses,
                         testing::ValuesIn(scenarios()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace cairn::conformance
