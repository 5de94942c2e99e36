// Apex's two tests of distributed training, over two ranks that are threads. Where Apex prints
// differences, these assert.
#include <gtest/gtest.h>

#include <cmath>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/sgd.h"
#include "cairn/parallel/compare.h"
#include "cairn/parallel/distributed.h"
#include "on_ranks.h"

namespace cairn::conformance {
namespace {

class Product : public nn::Module {
 public:
  explicit Product(std::int64_t n)
      : a(add_parameter("a", Tensor::full({n}, 1.0))),
        b(add_parameter("b", Tensor::full({n}, 2.0))) {}
  std::string kind() const override { return "Product"; }
  Tensor forward(const Tensor& x) override { return autograd::mul(autograd::mul(x, a), b); }
  Tensor a, b;
};

double exact_sum(const Tensor& x) {
  const auto* values = x.data<float>();
  double sum = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) sum += values[i];
  return sum;
}

/// Three streams, a bucket for each parameter, reductions while backward goes on: a gradient that
/// was reduced too early, or read too early, has another sum.
TEST(Ddp, GradientsAreWholeWhenSeveralStreamsReduceThem) {
  constexpr std::int64_t kElements = std::int64_t{4096} * 4096;
  on_ranks(2, [](parallel::ProcessGroup& group) {
    Product model(kElements);
    parallel::DistributedDataParallel ddp(model, group,
                                          {.first_bucket_bytes = 1,
                                           .bucket_bytes = 1,
                                           .trigger_parameters = {"b"},
                                           .num_allreduce_streams = 3});
    for (int i = 0; i < 10; ++i) {
      const Tensor x = Tensor::full({kElements}, i + group.rank());
      autograd::backward(autograd::sum(ddp(x)));
      const double n = kElements, mean = (2.0 * i + 1.0) / 2.0;
      ASSERT_EQ(exact_sum(model.a.grad()), 2.0 * n * mean);
      ASSERT_EQ(exact_sum(model.b.grad()), n * mean);
      model.clear_grad();
    }
  });
}

TEST(Ddp, MasterWeightsAgreeBetweenRanksAfter500Steps) {
  on_ranks(2, [](parallel::ProcessGroup& group) {
    manual_seed(static_cast<std::uint64_t>(group.rank()));  // other weights, other data
    nn::Linear model(1024, 16);
    optim::FusedSGD optimizer(model.parameters(), {.lr = 1e-3});
    parallel::DistributedDataParallel ddp(model, group);
    amp::Amp precision =
        amp::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2, .world = ddp.world()});
    Generator generator(static_cast<std::uint64_t>(10 + group.rank()));
    Tensor x = Tensor::empty({64, 1024}), y = Tensor::empty({64, 16});
    generator.fill_normal(x, 0.0, 1.0);
    generator.fill_normal(y, 0.0, 1.0);
    for (int step = 0; step < 500; ++step) {
      precision.backward(autograd::mse_loss(autograd::to(ddp(x), DType::f32), y));
      (void)precision.step();
    }
    NamedTensors all = model.parameters();
    for (const auto& [name, weight] : model.parameters()) {
      const Tensor master = kernels::master_value(weight);
      all.push_back({name + " (master)", master});
      const auto half = weight.to_vector<double>(), exact = master.to_vector<double>();
      ASSERT_EQ(weight.dtype(), DType::f16);
      for (std::size_t i = 0; i < half.size(); ++i)
        ASSERT_NEAR(half[i], exact[i], 0.005 * std::abs(exact[i]) + 1e-7);
    }
    parallel::check_same_across_ranks(all, group);  // Apex: close; here the same bits
  });
}

}  // namespace
}  // namespace cairn::conformance
