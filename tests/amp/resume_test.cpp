// A resumed run continues the bits of the unbroken one, in any order of initialize and load.
#include <algorithm>
#include <array>
#include <optional>

#include "support.h"

namespace cairn::amp {
namespace {

struct Saved {
  StateDict model, optimizer, precision;
};

struct Trained {
  Trained() : model(make_model(3)), optimizer(model.parameters(), rule()) {}
  static optim::AdamOptions rule() { return {.lr = 1e-2, .weight_decay = 0.05}; }
  void initialize(const Options& options) {
    precision = amp::initialize(model, optimizer, options);
  }
  void train(std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t step = from; step < to; ++step) {
      expect_applied(train_step(model, *precision, make_batch(step)));
    }
  }
  Saved save() const {
    return {snapshot(model.state_dict()), snapshot(optimizer.state_dict()),
            snapshot(precision->state_dict())};
  }

  nn::Sequential model;
  optim::FusedAdam optimizer;
  std::optional<Amp> precision;
};

Options quick(OptLevel level, DType half) {
  return {
      .opt_level = level, .half_dtype = half, .scaler = {.init_scale = 1024, .growth_interval = 6}};
}

class Resume : public testing::TestWithParam<DType> {};

TEST_P(Resume, IsBitExactInAnyOrderOfInitializeAndLoad) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    const Options options = quick(level, GetParam());
    Trained unbroken;
    unbroken.initialize(options);
    unbroken.train(0, 10);
    const Saved saved = unbroken.save();
    unbroken.train(10, 30);
    const auto expected = everything(unbroken.model, unbroken.optimizer);
    const double expected_scale = unbroken.precision->loss_scale();

    std::array<int, 4> order{0, 1, 2, 3};  // initialize, load model, load optimizer, load amp
    do {
      if (std::find(order.begin(), order.end(), 3) < std::find(order.begin(), order.end(), 0))
        continue;
      SCOPED_TRACE(core::str(name(level), " order ", order[0], order[1], order[2], order[3]));
      Trained resumed;
      manual_seed(99);  // other initial values than the saved run's must not matter
      for (const NamedTensor& entry : resumed.model.parameters()) kernels::fill(entry.tensor, 0.25);
      for (const int what : order) {
        if (what == 0) resumed.initialize(options);
        if (what == 1) resumed.model.load_state_dict(saved.model);
        if (what == 2) resumed.optimizer.load_state_dict(saved.optimizer);
        if (what == 3) resumed.precision->load_state_dict(saved.precision);
      }
      resumed.train(10, 30);
      ASSERT_EQ(everything(resumed.model, resumed.optimizer), expected);
      EXPECT_EQ(resumed.precision->loss_scale(), expected_scale);
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_P(Resume, AnotherLevelContinuesFromTheTruth) {
  Trained o2;
  o2.initialize(quick(OptLevel::O2, GetParam()));
  o2.train(0, 5);
  const Saved saved = o2.save();
  EXPECT_EQ(saved.model.dict("0").tensor("weight").dtype(), DType::f32);
  EXPECT_EQ(values(saved.model.dict("0").tensor("weight")), exact(o2.model.parameters()[0].tensor));
  for (const OptLevel level : kLevels) {
    Trained other;
    other.initialize({.opt_level = level});
    other.model.load_state_dict(saved.model);
    other.optimizer.load_state_dict(saved.optimizer);
    other.precision->load_state_dict(saved.precision);
    const bool takes_over =
        other.precision->options().dynamic_loss_scale && GetParam() == DType::f16;
    const double own = level == OptLevel::O1 || level == OptLevel::O2 ? 65536.0 : 1.0;
    EXPECT_EQ(other.precision->loss_scale(), takes_over ? o2.precision->loss_scale() : own);
    if (level == OptLevel::O0) {
      EXPECT_EQ(values(other.model.parameters()[0].tensor), exact(o2.model.parameters()[0].tensor));
    }
    EXPECT_TRUE(train_step(other.model, *other.precision, make_batch(6)).applied);
  }
}

INSTANTIATE_TEST_SUITE_P(Halves, Resume, testing::ValuesIn(kHalves),
                         [](const auto& info) { return std::string(core::name(info.param)); });

}  // namespace
}  // namespace cairn::amp
