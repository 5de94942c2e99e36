// Checkpoints of sharded trainings: they resume with any number of ranks, sharded or not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"
#include "support/step.h"

namespace cairn {
namespace {

using test::kAdam;
using test::make;
using test::Recipe;
using test::Training;
using ::testing::HasSubstr;

std::string folder_of(const std::string& name) {
  const auto path = std::filesystem::temp_directory_path() /
                    core::str("cairn-sharding-", name, "-", getuid(), "-", getpid());
  std::filesystem::remove_all(path);
  return path.string();
}

struct Form {
  int world_size;
  test::Stage stage;
  int within = 0;  // ShardedOptions::shard_within
};

/// Trains, and saves.
void save(const Recipe& recipe, Form form, const std::string& dir) {
  test::run_threads(form.world_size, [&](parallel::ProcessGroup& group) {
    Training training(recipe, group, form.stage, {.shard_within = form.within});
    for (int step = 0; step < 4; ++step) test::expect_applied(training.step());
    training.state->save(dir, 4);
  });
}

/// What a training has that resumes in this form: whole, as DistributedDataParallel hands it out.
void expect_resumes_alike(const Recipe& recipe, Form form, const std::string& sharded_dir,
                          const std::string& plain_dir) {
  test::run_threads(form.world_size, [&](parallel::ProcessGroup& group) {
    Training from_sharded(recipe, group, form.stage, {.shard_within = form.within});
    Training from_plain(recipe, group, test::kPlain);
    ASSERT_TRUE(from_sharded.state->resume_latest(sharded_dir));
    ASSERT_TRUE(from_plain.state->resume_latest(plain_dir));
    for (int step = 0; step <= 3; ++step) {
      std::int64_t elements = 0;
      ASSERT_EQ(test::difference_of_weights(from_sharded, from_plain), "") << step;
      ASSERT_EQ(test::difference_in_parts(from_sharded.optimizer->state_dict(),
                                          from_plain.optimizer->state_dict(), elements),
                "")
          << step;
      ASSERT_EQ(test::difference_in_parts(from_sharded.net.state_dict(),
                                          from_plain.net.state_dict(), elements),
                "")
          << step;
      test::expect_applied(from_sharded.step());
      test::expect_applied(from_plain.step());
    }
  });
}

class ShardedStates : public testing::TestWithParam<Recipe> {};

TEST_P(ShardedStates, ResumeInEveryForm) {
  const std::string plain = folder_of("plain"), sharded = folder_of("sharded");
  save(GetParam(), {3, test::kPlain}, plain);
  save(GetParam(), {3, test::kStates}, sharded);
  for (const Form form : {Form{3, test::kStates}, Form{2, test::kStates}, Form{4, test::kStates},
                          Form{2, test::kPlain}, Form{1, test::kPlain}, Form{1, test::kStates}}) {
    SCOPED_TRACE(core::str(form.world_size, form.stage ? " sharded" : " plain"));
    expect_resumes_alike(GetParam(), form, sharded, plain);
    expect_resumes_alike(GetParam(), form, plain, plain);
  }
  // NCCL adds up more than two ranks in an order of its own.
  if (!core::default_device().is_cuda()) {
    expect_resumes_alike(GetParam(), {2, test::kGradients}, sharded, plain);
    std::filesystem::remove_all(sharded);
    save(GetParam(), {3, test::kGradients}, sharded);
    expect_resumes_alike(GetParam(), {4, test::kStates}, sharded, plain);
    expect_resumes_alike(GetParam(), {2, test::kPlain}, sharded, plain);
    expect_resumes_alike(GetParam(), {3, test::kParameters}, sharded, plain);
    std::filesystem::remove_all(sharded);
    save(GetParam(), {3, test::kParameters}, sharded);
    for (const Form form : {Form{4, test::kParameters}, Form{2, test::kGradients},
                            Form{2, test::kPlain}, Form{1, test::kParameters}})
      expect_resumes_alike(GetParam(), form, sharded, plain);
  }
  std::filesystem::remove_all(plain);
  std::filesystem::remove_all(sharded);
}

std::vector<Recipe> recipes_of_states() {
  const auto adam = make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2});
  return {
      {.name = "O0", .optimizer = adam, .level = amp::OptLevel::O0},
      {.name = "O2_bf16", .optimizer = adam},
      {.name = "O2_f16", .optimizer = adam, .half = DType::f16},
      {.name = "compact",
       .optimizer = adam,
       .states = {.moments = DType::bf16, .masters = optim::MasterStorage::remainder}},
      {.name = "lamb", .optimizer = make<optim::FusedLAMB>(optim::LambOptions{.lr = 0.01})},
      {.name = "novograd",
       .optimizer = make<optim::FusedNovoGrad>(optim::NovoGradOptions{.lr = 0.01})},
  };
}

INSTANTIATE_TEST_SUITE_P(, ShardedStates, testing::ValuesIn(recipes_of_states()),
                         [](const auto& info) { return info.param.name; });

// Copies of shards are saved once, and a checkpoint says nothing of them.
class HybridStates : public testing::TestWithParam<Recipe> {};

TEST_P(HybridStates, ResumeInEveryForm) {
  if (core::default_device().is_cuda()) GTEST_SKIP() << "NCCL adds up in an order of its own";
  const std::string plain = folder_of("plain"), hybrid = folder_of("hybrid");
  save(GetParam(), {4, test::kPlain}, plain);
  for (const auto stage : {test::kStates, test::kGradients, test::kParameters}) {
    save(GetParam(), {4, stage, 2}, hybrid);
    const std::vector<Form> forms{
        {2, test::kPlain},         {3, test::kStates}, {4, test::kGradients, 2},
        {6, test::kParameters, 3}, {6, stage, 2},      {1, test::kPlain}};
    for (const Form& form : forms) {
      SCOPED_TRACE(
          core::str(form.world_size, form.stage ? " sharded by " : " plain ", form.within));
      expect_resumes_alike(GetParam(), form, hybrid, plain);
      expect_resumes_alike(GetParam(), form, plain, plain);
    }
    std::filesystem::remove_all(hybrid);
  }
  std::filesystem::remove_all(plain);
}

INSTANTIATE_TEST_SUITE_P(, HybridStates, testing::ValuesIn(recipes_of_states()),
                         [](const auto& info) { return info.param.name; });

TEST(HybridState, IsSavedOnce) {
  const auto bytes_of = [](Form form) {
    const std::string dir = folder_of("once");
    save(kAdam, form, dir);
    std::size_t bytes = 0;
    for (const auto& file : std::filesystem::recursive_directory_iterator(dir)) {
      if (file.path().extension() == ".safetensors") bytes += file.file_size();
    }
    std::filesystem::remove_all(dir);
    return static_cast<double>(bytes);
  };
  const double once = bytes_of({2, test::kParameters});
  EXPECT_NEAR(bytes_of({4, test::kParameters, 2}), once, 0.05 * once);
}

// A part that cannot load gives all of them their old state back, the other ranks' weights too.
TEST(ShardedState, AFailedLoadChangesNothing) {
  const std::string dir = folder_of("failed");
  save(kAdam, {2, test::kStates}, dir);
  test::run_threads(2, [&](parallel::ProcessGroup& group) {
    Training training(kAdam, group, test::kStates), same(kAdam, group, test::kStates);
    for (int step = 0; step < 2; ++step) {
      test::expect_applied(training.step());
      test::expect_applied(same.step());
    }
    struct Refuses : core::Stateful {
      StateDict state_dict() const override { return {}; }
      void load_state_dict(const StateDict&) override { throw core::DataError("[test] refused"); }
    } refuses;
    checkpointing::TrainingState state({{"model", training.net},
                                        {"optimizer", *training.optimizer},
                                        {"amp", *training.precision},
                                        {"ddp", refuses}},
                                       training.ddp().world());
    const std::string said = test::message_of<core::DataError>([&] { state.resume_latest(dir); });
    EXPECT_THAT(said, HasSubstr("refused"));
    for (int step = 0; step < 3; ++step) {
      ASSERT_EQ(test::difference_of_weights(training, same), "") << step;
      test::expect_applied(training.step());
      test::expect_applied(same.step());
    }
  });
  std::filesystem::remove_all(dir);
}

// The optimizer's own state, without a file: what was handed out is taken back.
TEST(ShardedState, GoThereAndBackWithoutAFile) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Training training(kAdam, group, test::kStates), same(kAdam, group, test::kStates);
    test::expect_applied(training.step());
    test::expect_applied(same.step());
    training.optimizer->load_state_dict(training.optimizer->state_dict());
    training.net.load_state_dict(training.net.state_dict());
    for (int step = 0; step < 2; ++step) {
      ASSERT_EQ(test::difference_of_weights(training, same), "") << step;
      test::expect_applied(training.step());
      test::expect_applied(same.step());
    }
  });
}

// An optimizer that has taken steps without ranks: it keeps its part of what it has.
TEST(ShardedState, AnOptimizerThatHasStepsBecomesSharded) {
  const auto step = [](optim::Optimizer& optimizer, const Tensor& y) {
    autograd::backward(autograd::sum(y));
    (void)optimizer.step();
  };
  test::run_threads(2, [&](parallel::ProcessGroup& group) {
    const Tensor x = Tensor::full({4, test::kInputs}, 0.5);
    test::OddNet net, same;
    optim::FusedAdam optimizer(net.parameters()), expected(same.parameters());
    step(optimizer, net.forward(x));
    step(expected, same.forward(x));
    parallel::ShardedDataParallel sharded(net, group);
    parallel::DistributedDataParallel plain(same, group);
    for (int i = 0; i < 2; ++i) {
      step(optimizer, sharded(x));
      step(expected, plain(x));
    }
    std::int64_t elements = 0;
    EXPECT_EQ(test::difference_in_parts(optimizer.state_dict(), expected.state_dict(), elements),
              "");
    EXPECT_GT(elements, 0);
    EXPECT_EQ(test::difference_of_weights(net, same), "");
  });
}

// A model that trained sharded and whose wrapper is gone.
TEST(ShardedState, OfRanksThatAreGoneAreAnError) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    test::OddNet net;
    optim::FusedAdam optimizer(net.parameters());
    {
      parallel::ShardedDataParallel sharded(net, group);
      autograd::backward(autograd::sum(sharded(Tensor::full({2, test::kInputs}, 0.5))));
      (void)optimizer.step();
    }
    autograd::backward(autograd::sum(net(Tensor::full({2, test::kInputs}, 0.5))));
    EXPECT_THAT(test::message_of([&] { (void)optimizer.step(); }),
                HasSubstr("what other ranks keep of it since it was sharded is not here"));
  });
}

// Everything that needs an exact value which is on another rank.
TEST(ShardedState, WholeMastersAreUnsupported) {
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    Training training(kAdam, group, test::kStates);
    test::expect_applied(training.step());
    const auto unsupported = [](auto&& f) {
      return test::message_of<core::Unsupported>([&] { f(); });
    };
    EXPECT_THAT(unsupported([&] { training.precision->release(); }), HasSubstr("is sharded"));
    EXPECT_THAT(unsupported([&] { (void)training.optimizer->torch_state_dict(); }),
                HasSubstr("a sharded one"));
    EXPECT_THAT(unsupported([&] { optim::WeightAverage average(training.net.parameters()); }),
                HasSubstr("this rank's part"));
    EXPECT_THAT(unsupported([&] { training.net.to(DType::f32); }), HasSubstr("this rank's part"));
    EXPECT_TRUE(training.step().applied);  // nothing of it has changed the training
  });
}

// Masters that lie on the host come from rank 0 as the others do.
TEST(StatesOnHost, AreBroadcastByWhoIsMadeAfterThem) {
  if (!core::default_device().is_cuda()) GTEST_SKIP() << "of GPUs";
  test::run_threads(2, [](parallel::ProcessGroup& group) {
    manual_seed(static_cast<std::uint64_t>(group.rank()));  // weights of its own
    nn::Linear net(70, 30);
    optim::FusedAdam optimizer(net.parameters(), {});
    optimizer.set_state_options({.on_host = true});
    amp::Amp precision =
        amp::initialize(net, optimizer, {.opt_level = amp::OptLevel::O2, .world = group.world()});
    parallel::DistributedDataParallel ddp(net, group);
    const Tensor master = kernels::MasterWeight::peek(net.weight())->tensor();
    EXPECT_TRUE(master.device().is_cpu());
    std::string values;
    for (const double value : master.to_vector()) values += core::str(value, ' ');
    const auto all = group.exchange(values, "masters");
    EXPECT_EQ(all[0], all[1]);
    const auto half = net.weight().to_vector(), exact = master.to_vector();
    for (std::size_t i = 0; i < half.size(); ++i) EXPECT_NEAR(half[i], exact[i], 1e-3);
  });
}

}  // namespace
}  // namespace cairn
