// A resumed training continues the bits of the unbroken one, at every opt level.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/amp/amp.h"
#include "cairn/autograd/ops.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/optimizer.h"
#include "checkpointing/temporary_folder.h"
#include "support/step.h"
#include "support/tensors.h"
#include "support/training.h"

namespace cairn::checkpointing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct ResumePrecision {
  const char* name;
  amp::OptLevel level;
  DType half;
  optim::StateOptions storage = {};
};

const optim::StateOptions kSmall{.moments = DType::bf16,
                                 .masters = optim::MasterStorage::remainder};

nn::Sequential make_model() {
  return nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.2),
                        nn::Linear(16, 4));
}

// Everything of one run, as a fresh process would build it.
struct Training {
  explicit Training(const ResumePrecision& p, std::uint64_t seed,
                    const std::string& resume_first = "")
      : model((manual_seed(seed), make_model())), optimizer(model.parameters(), {.lr = 0.01}) {
    optimizer.set_state_options(p.storage);
    if (!resume_first.empty()) {  // before amp knows of the model
      TrainingState({{"model", model}, {"optimizer", optimizer}, {"amp", placeholder}})
          .resume(resume_first);
    }
    amp::Options options;
    options.opt_level = p.level;
    options.half_dtype = p.half;
    precision.emplace(amp::initialize(model, optimizer, options));
  }

  void train(int first, int last) {
    for (int step = first; step <= last; ++step) {
      const Tensor x = test::normal_tensor({32, 8}, static_cast<std::uint64_t>(step));
      const std::vector<double> values = x.to_vector();
      std::vector<std::int64_t> labels(32);
      for (std::size_t i = 0; i < 32; ++i) labels[i] = values[i * 8] > 0 ? 1 : 3;
      const Tensor logits = checkpoint([&](const Tensor& z) { return model(z); }, x);
      const Tensor loss = nn::cross_entropy(logits, Tensor::from(labels, {32}));
      precision->backward(loss);
      test::expect_applied(precision->step());
    }
  }
  TrainingState state() {
    return TrainingState({{"model", model}, {"optimizer", optimizer}, {"amp", *precision}});
  }

  struct Placeholder : core::Stateful {  // takes any state
    StateDict state_dict() const override { return {}; }
    void load_state_dict(const StateDict&) override {}
  };
  Placeholder placeholder;
  nn::Sequential model;
  optim::FusedAdam optimizer;
  std::optional<amp::Amp> precision;
};

void expect_same_contents(const std::string& a, const std::string& b) {
  const auto left = summarize_checkpoint(a).entries, right = summarize_checkpoint(b).entries;
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].name, right[i].name);
    EXPECT_EQ(left[i].checksum, right[i].checksum) << left[i].name;
    EXPECT_EQ(left[i].text, right[i].text) << left[i].name;
  }
}

class Resume : public ::testing::TestWithParam<ResumePrecision> {};

TEST_P(Resume, ContinuesTheBitsOfTheUnbrokenRun) {
  const TemporaryFolder dir;
  Training unbroken(GetParam(), 1);
  unbroken.train(1, 4);
  unbroken.state().save(dir / "a", 4);
  unbroken.train(5, 8);
  const std::string whole = unbroken.state().save(dir / "a", 8);

  Training resumed(GetParam(), 999);
  TrainingState state = resumed.state();
  EXPECT_EQ(state.resume(dir / "a/step-00000004").step, 4);
  resumed.train(5, 8);
  expect_same_contents(whole, state.save(dir / "b", 8));
}

TEST_P(Resume, FilesHoldFullPrecision) {
  const TemporaryFolder dir;
  Training run(GetParam(), 1);
  run.train(1, 2);
  for (const CheckpointEntry& entry :
       summarize_checkpoint(run.state().save(dir.string(), 2)).entries) {
    const bool half_model = GetParam().level == amp::OptLevel::O3;  // which has no masters
    if (entry.kind != EntryKind::tensor || (half_model && entry.name.starts_with("model")))
      continue;
    EXPECT_EQ(entry.dtype, DType::f32) << entry.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Resume,
    ::testing::Values(ResumePrecision{"O0", amp::OptLevel::O0, DType::f16},
                      ResumePrecision{"O1_f16", amp::OptLevel::O1, DType::f16},
                      ResumePrecision{"O2_f16", amp::OptLevel::O2, DType::f16},
                      ResumePrecision{"O2_bf16", amp::OptLevel::O2, DType::bf16},
                      ResumePrecision{"O2_bf16_small", amp::OptLevel::O2, DType::bf16, kSmall},
                      ResumePrecision{"O3_bf16", amp::OptLevel::O3, DType::bf16}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ResumeStorage, AnyStorageContinuesAnyFileAndTheFileIsTheSame) {
  const TemporaryFolder dir;
  const ResumePrecision small{"", amp::OptLevel::O2, DType::bf16, kSmall};
  const ResumePrecision plain{"", amp::OptLevel::O2, DType::bf16};
  Training begun(small, 1);
  begun.train(1, 4);
  const std::string file = begun.state().save(dir / "a", 4);
  for (const ResumePrecision& storage : {plain, small}) {
    for (const bool load_first : {false, true}) {
      Training resumed(storage, 999, load_first ? file : "");
      TrainingState state = resumed.state();
      state.resume(file);
      expect_same_contents(file, state.save(dir / "b", 4));
    }
  }
}

TEST(ResumeOrder, LoadingBeforeInitializeIsTheSameAsAfter) {
  const TemporaryFolder dir;
  const ResumePrecision o2{"O2", amp::OptLevel::O2, DType::bf16};
  Training run(o2, 1);
  run.train(1, 3);
  const std::string saved = run.state().save(dir / "a", 3);
  run.train(4, 5);
  const std::string whole = run.state().save(dir / "a", 5);

  Training before(o2, 7, saved);
  before.train(4, 5);
  expect_same_contents(whole, before.state().save(dir / "b", 5));
}

TEST(ResumeOrder, AnotherOptLevelTakesTheFullPrecisionValues) {
  const TemporaryFolder dir;
  Training saved({"O2", amp::OptLevel::O2, DType::f16}, 1);
  saved.train(1, 3);
  const std::string path = saved.state().save(dir / "a", 3);
  Training other({"O0", amp::OptLevel::O0, DType::f16}, 7);
  other.state().resume(path);
  const auto left = flatten(saved.model.state_dict()), right = flatten(other.model.state_dict());
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(std::get<Tensor>(left[i].second).to_vector(),
              std::get<Tensor>(right[i].second).to_vector())
        << left[i].first;
  }
}

// Not a checkpoint that does not fit: nothing has changed, and the same one is resumed.
TEST(ResumeMemory, ThatIsRefusedIsOutOfMemoryAndChangesNothing) {
  const ResumePrecision o2{"O2", amp::OptLevel::O2, DType::bf16};
  const TemporaryFolder dir;
  Training saved(o2, 1), resumed(o2, 2);
  saved.train(1, 2);
  saved.state().save(dir.string(), 2);
  resumed.train(1, 1);
  const auto everything = [](Training& training) {
    return test::everything(training.model.parameters(), training.optimizer);
  };
  const auto before = everything(resumed);
  const Device device = core::default_device();
  int refused = 0;
  for (std::size_t room = 0;; room += 512) {
    core::set_memory_capacity(device, core::memory_stats(device).current_total + room);
    try {
      resumed.state().resume_latest(dir.string());
      break;
    } catch (const core::OutOfMemory&) {
      core::set_memory_capacity(device, SIZE_MAX);
      ++refused;
      EXPECT_EQ(everything(resumed), before) << room;
    }
  }
  core::set_memory_capacity(device, SIZE_MAX);
  EXPECT_GT(refused, 1);
  EXPECT_EQ(everything(resumed), everything(saved));
}

TEST(ResumeMismatch, NamesEveryEntryOfAnotherModel) {
  const TemporaryFolder dir;
  const ResumePrecision o0{"O0", amp::OptLevel::O0, DType::f16};
  Training run(o0, 1);
  run.train(1, 2);
  run.state().save(dir.string(), 2);
  manual_seed(3);
  nn::Sequential model(nn::Linear(8, 12), nn::ReLU());
  model.add(nn::Linear(12, 4, {.bias = false}));
  optim::FusedAdam optimizer(model.parameters());
  const auto before = flatten(model.state_dict());
  TrainingState state({{"model", model}, {"optimizer", optimizer}});
  const std::string message =
      message_of<core::DataError>([&] { state.resume_latest(dir.string()); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("0.weight"), HasSubstr("2.weight"), HasSubstr("1.running_mean"),
                    HasSubstr("4.bias"), HasSubstr("in 'optimizer'"), HasSubstr("surplus: 'amp'")));
  EXPECT_EQ(std::get<Tensor>(before[0].second).to_vector(),
            std::get<Tensor>(flatten(model.state_dict())[0].second).to_vector());
}

}  // namespace
}  // namespace cairn::checkpointing
