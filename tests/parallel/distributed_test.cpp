// DistributedDataParallel: gradients of several ranks against one process on the whole batch.
#include "cairn/parallel/distributed.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/optimizer.h"
#include "cairn/optim/optimizer_access.h"
#include "cairn/optim/sgd.h"
#include "environment.h"
#include "ranks.h"
#include "support/expect_error.h"
#include "support/near.h"
#include "support/step.h"
#include "support/tensors.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::expect_error;
using test::expect_near;
using test::fast_options;
using test::JobVariables;
using test::normal_tensor;
using test::run_ranks;
using test::run_threads;
using test::start_ranks;

constexpr std::int64_t kBatch = 6;  // samples a rank

nn::Sequential make_mlp(std::uint64_t seed) {
  manual_seed(seed);
  return nn::Sequential(nn::Linear(20, 33), nn::ReLU(), nn::Linear(33, 17), nn::Tanh(),
                        nn::Linear(17, 4));
}

/// Rank's samples: [kBatch, 20] of a batch that is the same for any number of ranks.
Tensor inputs(int rank, std::uint64_t step = 0) {
  return normal_tensor({kBatch, 20}, 1000 + 10 * step + static_cast<std::uint64_t>(rank));
}
Tensor targets(int rank) {
  return normal_tensor({kBatch, 4}, 2000 + static_cast<std::uint64_t>(rank));
}

Tensor all_ranks(int world, const std::function<Tensor(int)>& make) {
  std::vector<float> values;
  Shape shape;
  for (int rank = 0; rank < world; ++rank) {
    const Tensor part = make(rank);
    const auto v = part.to_vector<float>();
    values.insert(values.end(), v.begin(), v.end());
    shape = part.shape();
  }
  shape[0] *= world;
  return Tensor::from(values, shape);
}

template <class Model>
void backward(Model& model, const Tensor& x, const Tensor& y) {
  autograd::backward(autograd::mse_loss(model(x), y));
}

std::vector<std::vector<float>> gradients(const nn::Module& model) {
  std::vector<std::vector<float>> all;
  for (const auto& [name, tensor] : model.parameters())
    all.push_back(tensor.grad().defined() ? tensor.grad().to_vector<float>()
                                          : std::vector<float>{});
  return all;
}

std::string bytes_of(const std::vector<std::vector<float>>& values) {
  std::string bytes;
  for (const auto& v : values)
    bytes.append(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float));
  return bytes;
}

void expect_same_on_every_rank(const ProcessGroup& group, const std::string& bytes) {
  for (const std::string& other : group.exchange(bytes, "bytes")) EXPECT_TRUE(other == bytes);
}

/// One process on the whole batch.
std::vector<std::vector<float>> reference_gradients(int world) {
  nn::Sequential model = make_mlp(7);
  backward(model, all_ranks(world, [](int rank) { return inputs(rank); }),
           all_ranks(world, targets));
  return gradients(model);
}

/// Small buckets: several in the small test model.
DistributedOptions small_buckets() {
  return {.first_bucket_bytes = 200, .bucket_bytes = 3000};
}

void check_gradients(ProcessGroup& group) {
  const auto expected = reference_gradients(group.world_size());
  std::string first_bits;
  for (const bool small : {false, true}) {
    nn::Sequential model = make_mlp(7);
    DistributedDataParallel ddp(model, group, small ? small_buckets() : DistributedOptions{});
    EXPECT_EQ(ddp.buckets().size() > 2, small);
    for (int step = 0; step < 3; ++step) {  // the same gradients each time, from the same slots
      backward(ddp, inputs(group.rank()), targets(group.rank()));
      const auto got = gradients(model);
      expect_near(got, expected, 1e-6);
      if (first_bits.empty()) first_bits = bytes_of(got);
      EXPECT_TRUE(bytes_of(got) == first_bits);  // whatever the buckets
      model.clear_grad();
    }
  }
  expect_same_on_every_rank(group, first_bits);
}

/// Weights after some steps; x and y make the batch of a step.
std::vector<std::vector<float>> trained(nn::Module& model,
                                        const std::function<Tensor(const Tensor&)>& forward,
                                        const std::function<Tensor(int step)>& x,
                                        const std::function<Tensor(int step)>& y) {
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
  for (int step = 0; step < 20; ++step) {
    backward(forward, x(step), y(step));
    test::expect_applied(optimizer.step());
  }
  std::vector<std::vector<float>> weights;
  for (const auto& [name, tensor] : model.parameters())
    weights.push_back(tensor.to_vector<float>());
  return weights;
}

/// One process with the whole batch; and again, with other buckets: the same bits.
void check_training(ProcessGroup& group) {
  const int world = group.world_size();
  const auto x = [&](int step, int rank) { return inputs(step * world + rank); };
  const auto y = [&](int step, int rank) { return targets(step * world + rank); };
  const auto all = [&](const auto& make) {
    return [&, make](int step) {
      return all_ranks(world, [&](int rank) { return make(step, rank); });
    };
  };
  nn::Sequential alone = make_mlp(7);
  const auto expected = trained(
      alone, [&](const Tensor& in) { return alone(in); }, all(x), all(y));
  std::string first_bits;
  for (const bool small : {false, true, false}) {
    nn::Sequential model = make_mlp(7);
    DistributedDataParallel ddp(model, group, small ? small_buckets() : DistributedOptions{});
    const auto got = trained(
        model, [&](const Tensor& in) { return ddp(in); },
        [&](int step) { return x(step, group.rank()); },
        [&](int step) { return y(step, group.rank()); });
    expect_near(got, expected, 1e-4);
    if (first_bits.empty()) first_bits = bytes_of(got);
    EXPECT_TRUE(bytes_of(got) == first_bits);
  }
  expect_same_on_every_rank(group, first_bits);
}

void check_all(ProcessGroup& group) {
  check_gradients(group);
  check_training(group);
}

TEST(Ddp, OneProcess) {
  const JobVariables variables({});
  ProcessGroup group = ProcessGroup::from_environment();
  check_all(group);
}
TEST(Ddp, TwoProcesses) {
  run_ranks(2, check_all);
}
TEST(Ddp, FourProcesses) {
  run_ranks(4, check_all);
}
TEST(Ddp, ThreeThreads) {
  run_threads(3, check_all);
}

void check_accumulation(ProcessGroup& group) {
  const int world = group.world_size();
  nn::Sequential reference = make_mlp(7);
  for (std::uint64_t micro = 0; micro < 3; ++micro) {
    for (int rank = 0; rank < world; ++rank)
      backward(reference, inputs(rank, micro), targets(rank));
  }
  auto expected = gradients(reference);
  for (auto& values : expected) {
    for (float& v : values) v /= static_cast<float>(world);
  }

  nn::Sequential model = make_mlp(7);
  DistributedDataParallel ddp(model, group, small_buckets());
  for (std::uint64_t micro = 0; micro < 3; ++micro) {
    const auto guard = ddp.no_sync(micro < 2);
    backward(ddp, inputs(group.rank(), micro), targets(group.rank()));
    if (micro < 2) {
      const auto all = group.exchange(bytes_of(gradients(model)), "unreduced");
      EXPECT_FALSE(all[0] == all[1]);
    }
  }
  expect_near(gradients(model), expected, 2e-6);
  expect_same_on_every_rank(group, bytes_of(gradients(model)));
}

TEST(Ddp, AccumulatesWithoutReducing) {
  run_ranks(2, check_accumulation);
}
TEST(Ddp, AccumulatesInThreads) {
  run_threads(2, check_accumulation);
}

TEST(Ddp, StartsFromRankZerosMasters) {
  run_threads(3, [](ProcessGroup& group) {
    for (const auto storage : {kernels::MasterStorage::f32, kernels::MasterStorage::remainder}) {
      nn::Linear model(5, 8);
      model.to(DType::bf16);
      for (const auto& [name, tensor] : model.parameters()) {
        const Tensor exact = Tensor::full(tensor.shape(), 0.1 * (1 + group.rank()));
        kernels::MasterWeight::assign(tensor, exact, storage);
      }
      DistributedDataParallel ddp(model, group);
      for (const auto& [name, tensor] : model.parameters()) {
        for (const double value : kernels::master_value(tensor).to_vector()) {
          EXPECT_EQ(value, static_cast<double>(0.1F)) << name;
        }
      }
    }
  });
}

TEST(Ddp, StartsFromRankZerosModel) {
  run_threads(3, [](ProcessGroup& group) {
    manual_seed(static_cast<std::uint64_t>(100 + group.rank()));
    nn::Sequential model(nn::Linear(5, 8), nn::BatchNorm1d(8), nn::Linear(8, 2));
    // Different inputs move the running statistics apart.
    model(normal_tensor({4, 5}, static_cast<std::uint64_t>(group.rank())));
    const auto state = [&] {
      std::vector<std::vector<float>> values;
      for (const auto& [name, tensor] : model.parameters()) {
        values.push_back(tensor.to_vector<float>());
      }
      for (const auto& [name, tensor] : model.buffers())
        values.push_back(tensor.to_vector<float>());
      return bytes_of(values);
    };
    const auto before = group.exchange(state(), "before");
    EXPECT_FALSE(before[0] == before[1]);
    DistributedDataParallel ddp(model, group);
    EXPECT_TRUE(state() == before[0]);

    ddp(normal_tensor({4, 5}, static_cast<std::uint64_t>(group.rank())));
    const auto apart = group.exchange(state(), "apart");
    EXPECT_FALSE(apart[0] == apart[1]);
    ddp.sync_buffers();
    EXPECT_TRUE(state() == apart[0]);
  });
}

/// bf16 weights whose truth is kept as remainders (optim::MasterStorage::remainder).
void check_remainders(ProcessGroup& group) {
  manual_seed(static_cast<std::uint64_t>(100 + group.rank()));
  nn::Sequential model(nn::Linear(5, 8), nn::Linear(8, 2));
  optim::FusedAdam optimizer(model.parameters(), {.lr = 0.1});
  optimizer.set_state_options({.masters = optim::MasterStorage::remainder});
  for (const auto& [name, tensor] : model.parameters()) {
    const Tensor exact = Tensor::from(tensor.to_vector<float>(), tensor.shape());
    Tensor(tensor).set_data(Tensor::empty(tensor.shape(), DType::bf16));
    kernels::MasterWeight::assign(tensor, exact, optim::MasterStorage::remainder);
  }
  optim::OptimizerAccess(optimizer).refresh();
  const auto truth = [&] {
    std::vector<std::vector<float>> values;
    for (const auto& [name, tensor] : model.parameters()) {
      values.push_back(kernels::master_value(tensor).to_vector<float>());
    }
    return bytes_of(values);
  };
  const auto before = group.exchange(truth(), "before");
  EXPECT_FALSE(before[0] == before[1]);
  DistributedDataParallel ddp(model, group);
  EXPECT_TRUE(truth() == before[0]);
  const Tensor x = normal_tensor({4, 5}, static_cast<std::uint64_t>(group.rank()));
  backward(ddp, autograd::to(x, DType::bf16), Tensor::zeros({4, 2}, DType::bf16));
  EXPECT_TRUE(optimizer.step().applied);
  EXPECT_FALSE(truth() == before[0]);
  expect_same_on_every_rank(group, truth());
}

TEST(Ddp, RemaindersStartFromRankZerosToo) {
  run_threads(3, check_remainders);
}
TEST(Ddp, RemaindersOfTwoProcesses) {
  run_ranks(2, check_remainders);
}

TEST(Ddp, NamesWhereModelsDiffer) {
  run_threads(3, [](ProcessGroup& group) {
    nn::Sequential model(nn::Linear(5, 8), nn::Linear(8, group.rank() == 2 ? 3 : 2));
    const auto wrap = [&] { DistributedDataParallel ddp(model, group); };
    expect_error<InvalidArgument>(
        wrap, {"[ddp]", "'1.weight' f32[2, 8]", "on rank 0", "'1.weight' f32[3, 8]", "on rank 2"});
  });
  run_threads(2, [](ProcessGroup& group) {
    nn::Sequential model(nn::Linear(5, 8));
    if (group.rank() == 1) model.add(nn::BatchNorm1d(8));
    const auto wrap = [&] { DistributedDataParallel ddp(model, group); };
    expect_error<InvalidArgument>(wrap, {"nothing more on rank 0", "'1.weight' f32[8] on rank 1"});
  });
}

TEST(Ddp, PlansBucketsInTheOrderOfBackward) {
  const JobVariables variables({});
  nn::Sequential model(nn::Linear(100, 100), nn::Linear(100, 100), nn::Linear(100, 2));
  const DistributedOptions options{.first_bucket_bytes = 1000, .bucket_bytes = 40'500};
  DistributedDataParallel ddp(model, ProcessGroup::from_environment(), options);
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : ddp.buckets()) names.push_back(bucket.parameters);
  const std::vector<std::vector<std::string>> expected = {
      {"2.bias", "2.weight"}, {"1.bias", "1.weight"}, {"0.bias", "0.weight"}};
  EXPECT_EQ(names, expected);
  EXPECT_EQ(ddp.buckets()[0].bytes, 16 * 4 + 200 * 4);  // slots are aligned to 64 bytes
  EXPECT_EQ(ddp.buckets()[1].dtype, DType::f32);

  StateDict state = ddp.state_dict();
  EXPECT_EQ(state.integer("buckets"), 3);
  state.set("bucket_bytes", std::int64_t{1});
  state.set("first_bucket_bytes", std::int64_t{1});
  ddp.load_state_dict(state);
  EXPECT_EQ(ddp.buckets().size(), 6u);
  EXPECT_EQ(ddp.state_dict().integer("bucket_bytes"), 1);
  state.set("bucket_bytes", std::int64_t{0});
  expect_error<InvalidArgument>([&] { ddp.load_state_dict(state); }, {"bucket sizes above 0"});
}

TEST(Ddp, FollowsAModelThatIsCastLater) {
  run_threads(2, [](ProcessGroup& group) {
    nn::Sequential model = make_mlp(7), local = make_mlp(7);
    DistributedDataParallel ddp(model, group, small_buckets());
    model.to(DType::bf16);
    local.to(DType::bf16);
    const auto cast = [](const Tensor& x) {
      return Tensor::from(x.to_vector<float>(), x.shape(), DType::bf16);
    };
    backward(ddp, cast(inputs(group.rank())), cast(targets(group.rank())));
    EXPECT_EQ(ddp.buckets()[0].dtype, DType::bf16);

    std::vector<std::vector<float>> sum;  // both ranks' gradients, computed here
    for (int rank = 0; rank < 2; ++rank) {
      backward(local, cast(inputs(rank)), cast(targets(rank)));
      const auto part = gradients(local);
      if (sum.empty()) sum.assign(part.size(), {});
      for (std::size_t p = 0; p < part.size(); ++p) {
        sum[p].resize(part[p].size());
        for (std::size_t i = 0; i < part[p].size(); ++i) sum[p][i] += part[p][i];
      }
      local.clear_grad();
    }
    const auto got = gradients(model);
    for (std::size_t p = 0; p < sum.size(); ++p) {
      for (float& v : sum[p]) v /= 2;
      const auto rounded =
          Tensor::from(sum[p], {static_cast<std::int64_t>(sum[p].size())}, DType::bf16)
              .to_vector<float>();
      EXPECT_EQ(got[p], rounded) << p;  // added in f32, rounded once
    }
  });
}

/// Uses its two halves by turns.
class Fork : public nn::Module {
 public:
  Fork() : a_(add_module("a", nn::Linear(20, 4))), b_(add_module("b", nn::Linear(20, 4))) {}
  std::string kind() const override { return "Fork"; }
  Tensor forward(const Tensor& x) override { return use_b ? (*b_)(x) : (*a_)(x); }
  bool use_b = false;

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Fork>(); }

 private:
  std::shared_ptr<nn::Linear> a_, b_;
};

TEST(Ddp, NamesAParameterWithoutAGradient) {
  run_threads(2, [](ProcessGroup& group) {
    Fork model;
    const auto train = [&] {  // a rank may hear of the other's error at any collective
      DistributedDataParallel ddp(model, group);
      model.use_b = group.rank() == 1;
      backward(ddp, inputs(0), targets(0));
    };
    expect_error<core::Error>(train, {"expected a gradient for every parameter, got none for",
                                      "on rank", "find_unused_parameters"});
    expect_error<CommunicationError>([&] { group.barrier("later"); }, {"gave up", ".bias'"});
  });
}

TEST(Ddp, TakesParametersThatAnotherRankReachesAsZeros) {
  run_threads(2, [](ProcessGroup& group) {
    Fork model;
    DistributedDataParallel ddp(
        model, group, {.first_bucket_bytes = 1, .bucket_bytes = 1, .find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      model.use_b = group.rank() == 1;
      backward(ddp, inputs(0), targets(0));
      const auto all = gradients(model);
      const auto used = group.exchange(bytes_of(all), "reduced");
      EXPECT_TRUE(used[0] == used[1]);
      for (const auto& values : all) {
        EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](float v) { return v != 0; }));
      }
      model.clear_grad();
    }
  });
}

TEST(Ddp, RecoversFromABackwardThatFailed) {
  run_threads(2, [](ProcessGroup& group) {
    nn::Sequential model = make_mlp(7);
    DistributedDataParallel ddp(model, group, small_buckets());
    {
      const auto hook = autograd::on_gradient_ready(
          model.parameters()[2].tensor,
          [](const Tensor&) { throw core::OutOfMemory("[test] no memory"); });
      EXPECT_THROW(backward(ddp, inputs(group.rank()), targets(group.rank())), core::OutOfMemory);
    }
    model.clear_grad();
    backward(ddp, inputs(group.rank()), targets(group.rank()));
    expect_near(gradients(model), reference_gradients(2), 1e-6);
  });
}

TEST(Ddp, ReducesWhileBackwardGoesOn) {
  std::atomic<bool> first_reduced = false;
  run_threads(2, [&](ProcessGroup& group) {
    nn::Sequential model = make_mlp(7);
    DistributedDataParallel ddp(model, group, small_buckets());
    // This rank takes part bucket by bucket; it is done with one when rank 0 has sent its part.
    if (group.rank() == 1) {
      group.exchange("", "the first batch");
      for (const auto& bucket : ddp.buckets()) {
        const auto& names = bucket.parameters;
        const std::string last = names.size() > 1 ? " ... " + names.back() : "";
        const Tensor zeros = Tensor::zeros({bucket.bytes / 4});
        group.all_reduce(zeros, ReduceOp::mean, "gradients " + names.front() + last);
        first_reduced = true;
      }
      group.exchange("", "the order of gradients");
      return;
    }
    bool seen_inside_backward = false;
    const auto hook =
        autograd::on_gradient_ready(model.parameters().front().tensor, [&](const Tensor&) {
          for (int i = 0; i < 500 && !first_reduced; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          seen_inside_backward = first_reduced;
        });
    backward(ddp, inputs(0), targets(0));
    EXPECT_TRUE(seen_inside_backward);
  });
}

// The ConvNet of the tutorials.

nn::Sequential make_conv_net() {
  manual_seed(3);
  return nn::Sequential(nn::Conv2d(1, 16, 5, {.padding = 2}), nn::BatchNorm2d(16), nn::ReLU(),
                        nn::MaxPool2d(2), nn::Conv2d(16, 32, 5, {.padding = 2}),
                        nn::BatchNorm2d(32), nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(),
                        nn::Linear(32 * 7 * 7, 10));
}

/// Noisy pictures of ten patterns: [8, 1, 28, 28].
Tensor pictures(std::uint64_t seed, const std::vector<std::int64_t>& labels) {
  std::vector<float> x = normal_tensor({8, 1, 28, 28}, 50 + seed).to_vector<float>();
  auto pixel = x.begin();
  for (const std::int64_t label : labels) {
    const auto pattern =
        normal_tensor({28 * 28}, 9000 + static_cast<std::uint64_t>(label)).to_vector<float>();
    for (const float p : pattern) {
      *pixel = 0.3f * *pixel + p;
      ++pixel;
    }
  }
  return Tensor::from(x, {8, 1, 28, 28});
}

/// Micro-batch of a step: rank r of two takes micro r.
template <class Model>
double conv_net_micro_step(Model& model, std::uint64_t step, std::uint64_t micro) {
  const std::uint64_t seed = 2 * step + micro;
  std::vector<std::int64_t> labels;
  for (std::uint64_t i = 0; i < 8; ++i)
    labels.push_back(static_cast<std::int64_t>((seed * 7 + i * 3) % 10));
  const Tensor loss = nn::cross_entropy(model(pictures(seed, labels)), Tensor::from(labels, {8}));
  autograd::backward(loss);
  return loss.item();
}

TEST(Ddp, ConvNetTrainsAsInOneProcess) {
  run_ranks(2, [](ProcessGroup& group) {
    constexpr std::uint64_t kSteps = 20;
    nn::Sequential alone = make_conv_net(), model = make_conv_net();
    optim::FusedSGD alone_optimizer(alone.parameters(), {.lr = 0.02, .momentum = 0.9});
    optim::FusedSGD optimizer(model.parameters(), {.lr = 0.02, .momentum = 0.9});
    DistributedDataParallel ddp(model, group,
                                {.first_bucket_bytes = 4096, .bucket_bytes = 32 << 10});
    double first = 0, alone_loss = 0, loss = 0;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      alone_loss = (conv_net_micro_step(alone, step, 0) + conv_net_micro_step(alone, step, 1)) / 2;
      test::expect_applied(alone_optimizer.step({.gradient_scale = 0.5}));
      loss = group.all_reduce_sum(
                 conv_net_micro_step(ddp, step, static_cast<std::uint64_t>(group.rank())), "loss") /
             2;
      test::expect_applied(optimizer.step());
      if (step == 0) first = loss;
    }
    EXPECT_NEAR(loss, alone_loss, 1e-5);
    EXPECT_LT(loss, first / 4);
    std::vector<std::vector<float>> weights;
    for (const auto& [name, tensor] : model.parameters())
      weights.push_back(tensor.to_vector<float>());
    expect_same_on_every_rank(group, bytes_of(weights));
  });
}

TEST(Ddp, AKilledRankEndsTheOthersInTraining) {
  const auto results = start_ranks(3, [](int rank) {
    const ProcessGroup group = ProcessGroup::from_environment();
    nn::Sequential model = make_mlp(7);
    DistributedDataParallel ddp(model, group);
    const auto train = [&] {
      for (int step = 0; step < 1'000'000; ++step) {
        if (rank == 1 && step == 10) raise(SIGKILL);
        backward(ddp, inputs(rank), targets(rank));
        model.clear_grad();
      }
    };
    expect_error<CommunicationError>(train,
                                     {"rank 1 died", "all_reduce mean f32", "'gradients 4."});
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 1 ? 128 + SIGKILL : 0) << results[rank].output;
    EXPECT_LT(results[rank].seconds, 10.0);
  }
}

}  // namespace
}  // namespace cairn::parallel
