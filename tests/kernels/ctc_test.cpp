#include "cairn/kernels/ctc.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using testing::HasSubstr;
using Labels = std::vector<std::int64_t>;

/// What a path reads as.
Labels read_path(const Labels& path, std::int64_t blank) {
  Labels labels;
  for (std::size_t t = 0; t < path.size(); ++t) {
    if (path[t] != blank && (t == 0 || path[t] != path[t - 1])) labels.push_back(path[t]);
  }
  return labels;
}

struct CtcReference {
  double probability = 0.0;
  std::vector<double> posterior;  // [T C]
};

/// By going through all C^T paths.
CtcReference ctc_reference(const std::vector<double>& log_probs, std::int64_t T, std::int64_t C,
                           const Labels& target, std::int64_t blank) {
  CtcReference all;
  all.posterior.assign(static_cast<std::size_t>(T * C), 0.0);
  auto paths = static_cast<std::int64_t>(std::pow(C, T));
  for (std::int64_t p = 0; p < paths; ++p) {
    Labels path;
    double log_probability = 0.0;
    for (std::int64_t t = 0, rest = p; t < T; ++t, rest /= C) {
      path.push_back(rest % C);
      log_probability += log_probs[static_cast<std::size_t>(t * C + rest % C)];
    }
    if (read_path(path, blank) != target) continue;
    all.probability += std::exp(log_probability);
    for (std::int64_t t = 0; t < T; ++t) {
      all.posterior[static_cast<std::size_t>(t * C + path[static_cast<std::size_t>(t)])] +=
          std::exp(log_probability);
    }
  }
  for (double& p : all.posterior) p /= all.probability;
  return all;
}

class Ctc : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, Ctc, testing::ValuesIn(test::devices()), test::device_name);

TEST_P(Ctc, EqualsTheSumOverAllPaths) {
  const std::int64_t T = 5, C = 4, S = 3;
  const std::vector<Labels> targets{{1, 2, 3}, {2, 2}, {}, {3, 1}, {1, 1, 1}};
  const Labels steps{5, 4, 5, 2, 4};  // the last is too short for two blanks between
  const auto N = static_cast<std::int64_t>(targets.size());
  for (const std::int64_t blank : {0, 3}) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      Labels padded, lengths;
      for (const Labels& target : targets) {
        lengths.push_back(static_cast<std::int64_t>(target.size()));
        for (std::size_t i = 0; i < static_cast<std::size_t>(S); ++i) {
          const std::int64_t label = i < target.size() ? target[i] : 0;
          padded.push_back(blank == 3 ? (label + 3) % 4 : label);  // other classes
        }
      }
      const Tensor x = test::random_tensor({T, N, C}, dtype, GetParam(), 1, -3, -0.5);
      const auto integers = [&](const Labels& values, const Shape& shape) {
        return Tensor::from(values, shape, DType::i64, GetParam());
      };
      const Tensor labels = integers(padded, {N, S}), inputs = integers(steps, {N}),
                   target_lengths = integers(lengths, {N});
      const CtcTargets all{labels, inputs, target_lengths, blank};
      const Tensor loss = Tensor::empty({N}, dtype, GetParam());
      const Tensor alpha = Tensor::empty({N, T, 2 * S + 1}, dtype, GetParam());
      const Tensor dloss = Tensor::from<double>({1.0, 2.0, -1.0, 0.5, 0.0}, {N}, dtype, GetParam());
      const Tensor dx = Tensor::empty({T, N, C}, dtype, GetParam());
      ctc_loss(x, all, loss, alpha);
      ctc_loss_backward(x, all, loss, alpha, dloss, dx);
      const std::vector<double> values = x.to_vector(), losses = loss.to_vector(),
                                gradient = dx.to_vector(), d = dloss.to_vector();
      const double tolerance = dtype == DType::f64 ? 1e-11 : 2e-5;
      for (std::int64_t n = 0; n < N; ++n) {
        const auto at = static_cast<std::size_t>(n);
        std::vector<double> own;
        for (std::int64_t t = 0; t < steps[at]; ++t) {
          const auto from = values.begin() + (t * N + n) * C;
          own.insert(own.end(), from, from + C);
        }
        const Labels target(padded.begin() + n * S, padded.begin() + n * S + lengths[at]);
        const CtcReference expected = ctc_reference(own, steps[at], C, target, blank);
        if (expected.probability == 0.0) {
          EXPECT_EQ(losses[at], std::numeric_limits<double>::infinity());
        } else {
          EXPECT_NEAR(losses[at], -std::log(expected.probability), tolerance) << n;
        }
        for (std::int64_t t = 0; t < T; ++t)
          for (std::int64_t c = 0; c < C; ++c) {
            const bool counts = t < steps[at] && d[at] != 0.0;
            const double wanted =
                counts ? -d[at] * expected.posterior[static_cast<std::size_t>(t * C + c)] : 0.0;
            EXPECT_NEAR(gradient[static_cast<std::size_t>((t * N + n) * C + c)], wanted, tolerance)
                << n << " " << t << " " << c;
          }
      }
    }
  }
}

TEST_P(Ctc, SaysWhatIsOutOfRange) {
  const Tensor x = Tensor::zeros({2, 1, 3}, DType::f32, GetParam());
  const auto integers = [&](const Labels& values, const Shape& shape) {
    return Tensor::from(values, shape, DType::i64, GetParam());
  };
  const Tensor good = integers({1}, {1, 1}), bad = integers({3}, {1, 1});
  const Tensor one = integers({1}, {1}), three = integers({3}, {1});
  const Tensor loss = Tensor::empty({1}, DType::f32, GetParam());
  const Tensor alpha = Tensor::empty({1, 2, 3}, DType::f32, GetParam());
  for (const CtcTargets& wrong :
       {CtcTargets{bad, one, one}, {good, three, one}, {good, one, three}}) {
    if (GetParam().is_cuda()) {
      ctc_loss(x, wrong, loss, alpha);
      EXPECT_TRUE(std::isnan(loss.to_vector()[0]));
    } else {
      EXPECT_THAT(test::message_of([&] { ctc_loss(x, wrong, loss, alpha); }),
                  HasSubstr("classes in 0..2"));
    }
  }
  EXPECT_THAT(test::message_of([&] {
                ctc_loss(x, {good, one, one, 3}, loss, alpha);
              }),
              HasSubstr("expected blank in 0..2"));
}

}  // namespace
}  // namespace cairn::kernels
