// Scaling a list of tensors: 288 configurations, 36 a pair of sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/lists.h"

namespace cairn::conformance {
namespace {

constexpr double kScale = 4.0;

struct Configuration {
  int repeat;
  std::int64_t offset;
  DType in, out;
  bool in_place;
};

class ListScaling : public testing::TestWithParam<PairCase> {
 protected:
  static bool scale(const List& in, const List& out) {
    return flag_of(kernels::multi_tensor_scale(in.views(), out.views(), 1.0 / kScale).read());
  }

  /// Everything is 4 before and 1 after.
  static void downscale(const List& in, const List& out) {
    out.fill(0.0);
    in.fill(kScale);
    EXPECT_FALSE(scale(in, out));
    EXPECT_EQ(out.count_not_close(1.0), 0);
  }

  static void find(const List& in, const List& out, std::size_t tensor, std::int64_t at,
                   double value) {
    in.fill(kScale);
    in.set(tensor, at, value);
    EXPECT_TRUE(scale(in, out)) << value << " at " << at << " of tensor " << tensor;
  }

  static void run(const Configuration& c) {
    SCOPED_TRACE(core::str(c.in, " to ", c.out, c.in_place ? " in place" : "", ", repeat ",
                           c.repeat, ", offset ", c.offset));
    const PairCase& pair = GetParam();
    const List out("out", pair, c.repeat, c.out, c.offset);
    const List in = c.in_place ? out : List("in", pair, c.repeat, c.in, c.offset);
    const double inf = std::numeric_limits<double>::infinity();
    const std::int64_t size_a = pair.pair[0].numel(), size_b = pair.pair[1].numel();
    const auto repeat = static_cast<std::size_t>(c.repeat);
    downscale(in, out);
    find(in, out, 0, 0, std::nan(""));
    find(in, out, 2 * repeat - 1, size_b - 1, inf);
    find(in, out, 2 * (repeat / 2), size_a / 2, inf);
  }
};

TEST_P(ListScaling, ScalesAndFindsInfAndNan) {
  for (std::int64_t offset : kOffsets) {
    for (int repeat : kRepeats) {
      for (DType in : kTypes) {
        for (DType out : kTypes) run({repeat, offset, in, out, false});
        run({repeat, offset, in, in, true});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ListScaling,
                         testing::ValuesIn(cases(std::begin(kFlatPairs), std::end(kFlatPairs))),
                         case_name);

}  // namespace
}  // namespace cairn::conformance
