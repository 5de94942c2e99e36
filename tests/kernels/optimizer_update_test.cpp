#include "cairn/kernels/optimizer_update.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cairn/core/stream.h"
#include "layouts.h"

namespace cairn::kernels {
namespace {

using test::epsilon;
using test::expect_close;
using test::LaidOut;
using test::Layout;
using test::message_of;
using test::random_values;
using Values = std::vector<double>;

constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};

// A parameter in double precision.
struct Reference {
  Values weight, moment1, moment2;

  void adam(const Values& gradient, const AdamOptions& o) {
    for (std::size_t i = 0; i < weight.size(); ++i) {
      double g = gradient[i] * o.gradient_scale;
      if (!o.adamw) g += o.weight_decay * weight[i];
      moment1[i] = o.beta1 * moment1[i] + (1 - o.beta1) * g;
      moment2[i] = o.beta2 * moment2[i] + (1 - o.beta2) * g * g;
      double step = moment1[i] / o.correction1 / (std::sqrt(moment2[i] / o.correction2) + o.eps);
      if (o.adamw) step += o.weight_decay * weight[i];
      weight[i] -= o.lr * step;
    }
  }

  void sgd(const Values& gradient, const SgdOptions& o) {
    for (std::size_t i = 0; i < weight.size(); ++i) {
      double g = gradient[i] * o.gradient_scale;
      if (!o.wd_after_momentum) g += o.weight_decay * weight[i];
      if (o.momentum != 0) {
        moment1[i] = o.first_step ? g : o.momentum * moment1[i] + (1 - o.dampening) * g;
        g = o.nesterov ? g + o.momentum * moment1[i] : moment1[i];
      }
      if (o.wd_after_momentum) g += o.weight_decay * weight[i];
      weight[i] -= o.lr * g;
    }
  }
};

struct Parameter {
  Tensor gradient, weight, master, moment1, moment2;
  Reference reference;

  UpdateEntry entry() const {
    UpdateEntry e{gradient, weight, {}, moment1, moment2};
    if (master) e.master = master;
    return e;
  }
  double precision() const {
    return master || weight.dtype() == DType::f32 ? epsilon(DType::f32) : epsilon(weight.dtype());
  }
  void expect_matches() const {
    const Tensor& truth = master ? master : weight;
    expect_close(truth, reference.weight, 8 * precision(), 16 * precision());
    expect_close(moment1, reference.moment1, 8 * precision(), 4 * precision());
    expect_close(moment2, reference.moment2, 8 * precision(), 4 * precision());
    if (!master) return;
    const Tensor once = Tensor::from(master.to_vector(), weight.shape(), weight.dtype());
    EXPECT_EQ(weight.to_vector(), once.to_vector());
  }
};

class Updates : public testing::TestWithParam<Device> {
 protected:
  Tensor make(std::int64_t n, DType dtype, std::uint64_t seed, double low = -1,
              double high = 1) const {
    return Tensor::from(random_values(n, seed, low, high), {n}, dtype, GetParam());
  }
  // Every mix of dtypes, at sizes around the chunk's and the vector's.
  std::vector<Parameter> parameters(std::int64_t n) const {
    std::vector<Parameter> all;
    for (DType gradient : kDtypes) {
      for (DType weight : kDtypes) {
        for (bool master : {false, true}) {
          Parameter p{make(n, gradient, 1),   make(n, weight, 2),           {},
                      make(n, DType::f32, 3), make(n, DType::f32, 4, 0, 1), {}};
          if (master) p.master = make(n, DType::f32, 5);
          p.reference = {(master ? p.master : p.weight).to_vector(), p.moment1.to_vector(),
                         p.moment2.to_vector()};
          all.push_back(p);
        }
      }
    }
    return all;
  }
  static std::vector<UpdateEntry> entries(const std::vector<Parameter>& all) {
    std::vector<UpdateEntry> list;
    for (const Parameter& p : all) list.push_back(p.entry());
    return list;
  }
};

TEST_P(Updates, AdamMatchesTheReferenceForEveryMixOfDtypes) {
  for (std::int64_t n : {std::int64_t{1}, std::int64_t{77}, std::int64_t{65536 + 19}}) {
    for (bool adamw : {false, true}) {
      const AdamOptions options{.lr = 0.05,
                                .beta1 = 0.8,
                                .beta2 = 0.9,
                                .eps = 1e-3,
                                .weight_decay = 0.1,
                                .adamw = adamw,
                                .correction1 = 0.36,
                                .correction2 = 0.19,
                                .gradient_scale = 0.5};
      auto all = parameters(n);
      adam_update(entries(all), options);
      for (Parameter& p : all) {
        p.reference.adam(p.gradient.to_vector(), options);
        p.expect_matches();
      }
    }
  }
}

TEST_P(Updates, SgdMatchesTheReferenceForEveryOption) {
  const SgdOptions cases[] = {
      {.lr = 0.1},
      {.lr = 0.1, .weight_decay = 0.1, .gradient_scale = 0.25},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .first_step = true},
      {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .gradient_scale = 2},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .wd_after_momentum = true},
      {.lr = 0.1, .weight_decay = 0.1, .wd_after_momentum = true}};
  for (const SgdOptions& options : cases) {
    auto all = parameters(1031);
    sgd_update(entries(all), options);
    for (Parameter& p : all) {
      p.reference.sgd(p.gradient.to_vector(), options);
      p.expect_matches();
    }
  }
}

TEST_P(Updates, SgdWithoutMomentumNeedsNoBuffer) {
  const Tensor w = make(9, DType::f32, 1), g = make(9, DType::f32, 2);
  Reference r{w.to_vector(), {}, {}};
  sgd_update({{g, w, {}, {}, {}}}, {.lr = 0.5});
  r.sgd(g.to_vector(), {.lr = 0.5});
  expect_close(w, r.weight, 1e-6, 1e-7);
}

TEST_P(Updates, ChannelsLastParametersAreUpdatedInPlace) {
  const Shape shape{3, 4, 5, 6};
  const auto laid = [&](std::uint64_t seed, double low) {
    return LaidOut(random_values(shape.numel(), seed, low, 1), shape, DType::f32, GetParam(),
                   Layout::channels_last);
  };
  const LaidOut g = laid(1, -1), w = laid(2, -1), m = laid(3, -1), v = laid(4, 0);
  Reference r{w.values(), m.values(), v.values()};
  adam_update({{g, w, {}, m, v}}, {});
  r.adam(g.values(), {});
  expect_close(w.values(), r.weight, 1e-6, 1e-7);
}

TEST(UpdatesOnStreams, FollowTheCurrentStream) {
  const Tensor g = Tensor::full({1000}, 1.0), w = Tensor::full({1000}, 1.0);
  const core::Stream stream = core::Stream::create({});
  {
    const core::StreamGuard guard(stream);
    sgd_update({{g, w, {}, {}, {}}}, {.lr = 0.5});
    sgd_update({{g, w, {}, {}, {}}}, {.lr = 0.25});
  }
  stream.synchronize();
  EXPECT_EQ(w.to_vector(), Values(1000, 0.25));
}

TEST_P(Updates, ErrorsNameTheEntry) {
  const Tensor w = make(6, DType::f32, 1), g = make(6, DType::f32, 2),
               wide = Tensor::zeros({6, 2}, DType::f32, GetParam());
  const auto adam = [&](UpdateEntry second) {
    return message_of([&] { adam_update({{g, w, {}, g, g}, second}, {}); });
  };
  EXPECT_EQ(adam({g, w, {}, g, {}}), "[adam_update] expected a moment2 in entry 1, got none");
  EXPECT_EQ(adam({g, w, {}, g, make(6, DType::f16, 3)}),
            "[adam_update] expected the moment2 of entry 1 of dtype f32, got f16");
  EXPECT_EQ(adam({make(5, DType::f32, 3), w, {}, g, g}),
            "[adam_update] expected the gradient of entry 1 of shape [6] and strides [1] like its "
            "weight, got [5] and [1]");
  EXPECT_EQ(adam({wide.view().select(1, 0), wide.view().select(1, 0), {}, g, g}),
            "[adam_update] expected a dense weight 1 (no gaps, no repeats), got shape [6] with "
            "strides [2]");
}

INSTANTIATE_TEST_SUITE_P(Devices, Updates, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
