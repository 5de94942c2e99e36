// Models that are described before they are made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/nn.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using ::testing::HasSubstr;

std::size_t held() {
  return core::memory_stats(core::default_device()).current_total;
}

std::shared_ptr<nn::Sequential> net() {
  auto made = std::make_shared<nn::Sequential>();
  made->add(nn::Linear(64, 300));
  made->add(nn::LayerNorm({300}));
  made->add(nn::Linear(300, 40));
  made->add(nn::Linear(40, 3));
  nn::init::orthogonal(made->parameters()[4].tensor, 2.0);
  return made;
}

TEST(DeferredInit, GivesTheValuesThatItWouldHaveGiven) {
  manual_seed(5);
  const auto plain = net();
  const double next = static_cast<double>(Generator::current().next());
  manual_seed(5);
  std::shared_ptr<nn::Sequential> later;
  {
    const nn::DeferredInit deferred;
    later = net();
  }
  EXPECT_FALSE(nn::DeferredInit::active());
  EXPECT_EQ(static_cast<double>(Generator::current().next()), next) << "later draws are the same";
  const NamedTensors expected = plain->parameters(), got = later->parameters();
  ASSERT_EQ(got.size(), expected.size());
  // From the last on: values do not depend on the order in which somebody asks.
  for (std::size_t i = got.size(); i-- > 0;) {
    EXPECT_EQ(got[i].tensor.to_vector(), expected[i].tensor.to_vector()) << got[i].name;
    EXPECT_EQ(core::deferred(got[i].tensor), "");
  }
}

TEST(DeferredInit, TakesNoMemoryUntilSomebodyAsks) {
  const std::size_t before = held();
  std::shared_ptr<nn::Linear> layer;
  {
    const nn::DeferredInit deferred;
    layer = std::make_shared<nn::Linear>(500, 400);
  }
  EXPECT_LT(held() - before, 4096);
  const Tensor weight = layer->parameters()[0].tensor;
  EXPECT_THAT(core::deferred(weight), HasSubstr("uniform in "));
  EXPECT_EQ(weight.shape(), (Shape{400, 500}));
  (void)(*layer)(Tensor::zeros({1, 500}));
  EXPECT_GE(held() - before, 800000);
  EXPECT_EQ(core::deferred(weight), "");
}

TEST(DeferredInit, IsTheThreadsOwn) {
  const nn::DeferredInit deferred;
  std::thread([] { EXPECT_FALSE(nn::DeferredInit::active()); }).join();
}

TEST(DeferredInit, ALoadedStateReplacesWhatWasDeferred) {
  const auto plain = net();
  const nn::DeferredInit deferred;
  const auto later = net();
  later->load_state_dict(plain->state_dict());
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_EQ(later->parameters()[i].tensor.to_vector(), plain->parameters()[i].tensor.to_vector());
  }
  const auto copy = net();
  EXPECT_EQ(copy->clone()->parameters()[0].tensor.to_vector(),
            copy->parameters()[0].tensor.to_vector());
}

TEST(Deferred, AFailedFillIsTheUsesErrorAndIsTriedAgain) {
  const Tensor x = Tensor::zeros({2000}, DType::f32, Device{});
  int calls = 0;
  core::defer(x, {[&calls](const Tensor& to) {
                    if (++calls == 1) throw core::IoError("no disk");
                    EXPECT_EQ(to.numel(), 2000);
                    const_cast<float*>(to.data<float>())[7] = 3.0F;
                  },
                  "a test"});
  EXPECT_EQ(calls, 0);
  EXPECT_THROW((void)x.raw_data(), core::IoError);
  EXPECT_EQ(core::deferred(x), "a test");
  EXPECT_EQ(x.to_vector()[7], 3.0);
  (void)x.to_vector();
  EXPECT_EQ(calls, 2);
}

TEST(Deferred, IsNotForWeightsWithAMaster) {
  const Tensor weight = Tensor::zeros({2000}, DType::bf16);
  EXPECT_TRUE(core::can_defer(weight));
  kernels::MasterWeight::make(weight);
  EXPECT_FALSE(core::can_defer(weight));
}

TEST(Deferred, NeedsMemoryOfItsOwn) {
  const auto message = [](const Tensor& x) {
    return test::message_of<core::InvalidArgument>([&] {
      core::defer(x, {[](const Tensor&) {}, "x"});
    });
  };
  const Tensor whole = Tensor::zeros({64, 64});
  EXPECT_THAT(message(whole.alias(whole.view().slice(0, 0, 32))), HasSubstr("of its own"));
  EXPECT_THAT(message(Tensor::zeros({1023})), HasSubstr("at least 1024 elements"));
  std::vector<float> foreign(2000);
  EXPECT_THAT(message(Tensor::wrap(TensorView(foreign.data(), {2000}, DType::f32))),
              HasSubstr("expected a contiguous tensor"));
}

}  // namespace
}  // namespace cairn
