// Sums of scaled lists of tensors: 576 configurations of flat tensors and 576 of channels-last
// images, 72 a pair of sizes each.
#include <gtest/gtest.h>

#include "conformance/lists.h"

namespace cairn::conformance {
namespace {

struct ListSumsConfiguration {
  int repeat;
  std::int64_t offset;
  DType x, y, out;
  bool in_place;
};

class ListSums : public testing::TestWithParam<PairCase> {
 protected:
  /// 2 * 4 + 8 * 16 = 136; out is y where in place.
  static void run(const ListSumsConfiguration& c) {
    SCOPED_TRACE(core::str(c.x, " and ", c.y, " to ", c.out, c.in_place ? " in place" : "",
                           ", repeat ", c.repeat, ", offset ", c.offset));
    const List x("x", GetParam(), c.repeat, c.x, c.offset);
    const List y("y", GetParam(), c.repeat, c.y, c.offset);
    const List out = c.in_place ? y : List("out", GetParam(), c.repeat, c.out, c.offset);
    out.fill(48.0);
    x.fill(4.0);
    y.fill(16.0);
    EXPECT_FALSE(flag_of(kernels::multi_tensor_axpby(2.0, x.views(), 8.0, y.views(), out.views(),
                                                     kernels::CheckedArgument::both)
                             .read()));
    EXPECT_EQ(out.count_not_close(136.0), 0);
  }
};

TEST_P(ListSums, AddsScaledLists) {
  for (std::int64_t offset : kOffsets) {
    for (int repeat : kRepeats) {
      for (DType x : kTypes) {
        for (DType y : kTypes) {
          for (DType out : kTypes) run({repeat, offset, x, y, out, false});
          run({repeat, offset, x, y, y, true});
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ListSums,
                         testing::ValuesIn(cases(std::begin(kFlatPairs), std::end(kFlatPairs))),
                         case_name);
INSTANTIATE_TEST_SUITE_P(ChannelsLast, ListSums,
                         testing::ValuesIn(cases(std::begin(kImagePairs), std::end(kImagePairs))),
                         case_name);

}  // namespace
}  // namespace cairn::conformance
