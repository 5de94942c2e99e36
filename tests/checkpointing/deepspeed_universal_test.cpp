// Universal checkpoints of DeepSpeed's, of golden/make_deepspeed_universal.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "cairn/amp/amp.h"
#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "checkpointing/temporary_folder.h"
#include "support/expect_error.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using core::DataError;
using core::IoError;
using test::expect_error;

std::string saved_by_deepspeed(const std::string& name) {
  return test::golden_file("deepspeed_universal/" + name);
}
constexpr const char* kStage2 = "stage2";
constexpr const char* kStage3 = "stage3_f16";

/// Undefined where there is none.
Tensor entry_of(const StateDict& state, const std::string& name) {
  for (const auto& [key, value] : flatten(state)) {
    if (key == name) return std::get<Tensor>(value);
  }
  return {};
}
std::vector<double> elements_of(const StateDict& state, const std::string& name) {
  const Tensor tensor = entry_of(state, name);
  return tensor ? tensor.to_vector() : std::vector<double>();
}
std::vector<double> elements_in_file(const std::string& path, const std::string& name) {
  return elements_of(read_torch(path), name);
}

/// The step that DeepSpeed or torch took next.
void expect_deepspeeds_step(nn::Module& model, optim::Optimizer& optimizer,
                            const std::string& folder) {
  optimizer.load_torch_state_dict(read_state(folder).dict("optimizer"));
  const StateDict theirs = read_torch(folder + "/after.pt");
  const Tensor y = model.forward(std::get<Tensor>(*theirs.find("x")));
  autograd::backward(autograd::sum(autograd::mul(y, y)));
  EXPECT_TRUE(optimizer.step().applied);
  const auto after = flatten(theirs.dict("after"));
  EXPECT_GE(after.size(), 2u);
  for (const auto& [name, value] : after) {
    const auto own = elements_of(model.state_dict(), name);
    const auto expected = std::get<Tensor>(value).to_vector();
    ASSERT_EQ(own.size(), expected.size()) << name;
    for (std::size_t i = 0; i < own.size(); ++i) EXPECT_NEAR(own[i], expected[i], 1e-6) << name;
  }
}

TEST(DeepSpeedUniversal, ATrainingOfStage2Continues) {
  nn::Sequential model(nn::BatchNorm1d(3, {.affine = false}), nn::Linear(3, 5), nn::Linear(5, 2));
  const std::string folder = saved_by_deepspeed(kStage2);
  EXPECT_EQ(kind_of_file(folder), FileKind::deepspeed_universal);
  EXPECT_EQ(kind_of_file(folder + "/steps_universal"), FileKind::deepspeed_universal);
  load(model, folder, {.part = "model"});
  NamedTensors all = model.parameters();
  ASSERT_EQ(all.size(), 4u);  // 1.weight, 1.bias, 2.weight, 2.bias
  all[2].tensor.set_requires_grad(false);
  optim::FusedAdam optimizer({all[0], all[1], all[3]}, {.lr = 1.0, .beta1 = 0.8, .beta2 = 0.95});
  expect_deepspeeds_step(model, optimizer, folder);
}

TEST(DeepSpeedUniversal, HoldsWhatTheFilesHold) {
  const std::string folder = saved_by_deepspeed(kStage2), zero = folder + "/steps_universal/zero/";
  const StateDict ours = read_state(folder);
  for (const std::string name : {"1.weight", "1.bias", "2.bias"}) {
    EXPECT_EQ(elements_of(ours, "model." + name),
              elements_in_file(zero + name + "/fp32.pt", "param"));
    for (const std::string moment : {"exp_avg", "exp_avg_sq"}) {
      EXPECT_EQ(elements_of(ours, "optimizer.state." + name + "." + moment),
                elements_in_file(zero + name + "/" + moment + ".pt", "param"));
    }
    EXPECT_EQ(elements_of(ours, "optimizer.state." + name + ".step"), std::vector<double>{2});
  }
  EXPECT_EQ(elements_of(ours, "model.2.weight"),
            elements_in_file(zero + "2.weight/fp32.pt", "param"));
  const std::string states = folder + "/steps_universal/mp_rank_00_model_states.pt";
  EXPECT_EQ(elements_of(ours, "model.0.running_var"),
            elements_in_file(states, "module.0.running_var"));
  EXPECT_EQ(entry_of(ours, "model.0.num_batches_tracked").dtype(), DType::i64);

  EXPECT_EQ(ours.integer("global_steps"), 2);
  EXPECT_EQ(ours.integer("epoch"), 3);  // client_state
  EXPECT_FALSE(ours.contains("amp"));   // f32
  std::vector<std::string> parts;
  for (const auto& [name, value] : ours) parts.push_back(name);
  EXPECT_EQ(parts, (std::vector<std::string>{"model", "optimizer", "skipped_steps", "global_steps",
                                             "global_samples", "epoch"}));
  const StateDict& groups = ours.dict("optimizer").dict("param_groups");
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups.dict("0").number("weight_decay"), 0.1);
  const StateDict& names = groups.dict("0").dict("params");
  EXPECT_EQ(names.text("0"), "1.weight");
  EXPECT_EQ(names.text("1"), "1.bias");
  EXPECT_EQ(names.text("2"), "2.bias");
}

class TiedHead : public nn::Module {
 public:
  std::string kind() const override { return "TiedHead"; }
  explicit TiedHead(const Tensor& weight) : weight_(add_parameter("weight", weight)) {}
  Tensor forward(const Tensor& x) override { return autograd::linear(x, weight_); }

 private:
  Tensor weight_;
};

/// Two layers of one weight.
class TiedLayers : public nn::Module {
 public:
  std::string kind() const override { return "TiedLayers"; }
  TiedLayers()
      : first_(add_module("0", nn::Linear(3, 3))),
        head_(add_module("2", TiedHead(first_->weight()))) {}
  Tensor forward(const Tensor& x) override { return (*head_)(autograd::tanh((*first_)(x))); }

 private:
  std::shared_ptr<nn::Linear> first_;
  std::shared_ptr<TiedHead> head_;
};

// f16 weights lie beside f32 masters, flat: the masters are what goes on.
TEST(DeepSpeedUniversal, ATrainingOfStage3Continues) {
  const std::string folder = saved_by_deepspeed(kStage3);
  TiedLayers model;
  const LoadReport report = load(model, folder, {.part = "model"});
  EXPECT_TRUE(report.surplus.empty());
  const NamedTensors all = model.parameters();
  ASSERT_EQ(all.size(), 2u);
  optim::FusedAdam optimizer({{.parameters = {all[0]}}, {.parameters = {all[1]}}},
                             {.lr = 1.0, .beta1 = 0.8, .beta2 = 0.95});
  expect_deepspeeds_step(model, optimizer, folder);
}

TEST(DeepSpeedUniversal, ADynamicLossScaleContinues) {
  const StateDict ours = read_state(saved_by_deepspeed(kStage3));
  nn::Sequential model(nn::Linear(3, 3));
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1e-2});
  amp::Amp precision = amp::initialize(
      model, optimizer,
      {.opt_level = amp::OptLevel::O2,
       .scaler = {.growth_interval = 2, .hysteresis = 2, .consecutive_hysteresis = false}});
  precision.load_state_dict(ours.dict("amp"));
  EXPECT_EQ(precision.loss_scale(), 512);  // twice the 256 that it began with
  EXPECT_EQ(precision.state_dict().dict("loss_scaler0").integer("overflows_left"), 2);
  precision.backward(autograd::sum(model(Tensor::full({1, 3}, 0.5))));
  EXPECT_TRUE(precision.step().applied);
  EXPECT_EQ(precision.loss_scale(), 1024);  // as DeepSpeed's after its fifth
}

/// A copy of a golden folder.
class GoldenCopy {
 public:
  explicit GoldenCopy(const std::string& name) { fs::copy(saved_by_deepspeed(name), path(), kAll); }
  std::string path() const { return folder_ / "saved"; }
  std::string file(const std::string& name) const { return path() + "/steps_universal/" + name; }
  void change(const std::string& name, const std::function<void(std::string&)>& change) const {
    std::ifstream in(file(name), std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(in), {});
    change(bytes);
    std::ofstream(file(name), std::ios::binary | std::ios::trunc) << bytes;
  }
  void replace(const std::string& name, std::string_view from, std::string_view to) const {
    change(name, [&](std::string& bytes) {
      const std::size_t at = bytes.find(from);
      ASSERT_NE(at, std::string::npos) << from;
      bytes.replace(at, from.size(), to);
    });
  }
  template <class Error>
  void expect_refused(const std::vector<std::string>& words) const {
    expect_error<Error>([&] { read_deepspeed_universal(path(), {.verify = false}); }, words);
  }

 private:
  static constexpr auto kAll = fs::copy_options::recursive;
  TemporaryFolder folder_;
};

constexpr const char* kModelStates = "mp_rank_00_model_states.pt";

TEST(DeepSpeedUniversal, NamesTheFileThatIsMissing) {
  for (const char* name : {"zero/1.weight/fp32.pt", "zero/1.bias/exp_avg_sq.pt"}) {
    const GoldenCopy copy(kStage2);
    fs::remove(copy.file(name));
    copy.expect_refused<IoError>({name});
  }
  {
    const GoldenCopy copy(kStage2);
    fs::remove(copy.file(kModelStates));
    copy.expect_refused<IoError>({kModelStates, "zero_pp_rank_0_mp_rank_00_model_states.pt"});
  }
  {
    const GoldenCopy copy(kStage2);
    fs::remove(copy.file("zero/optimizer_state.pt"));
    copy.expect_refused<IoError>({"zero/optimizer_state.pt"});
  }
  {
    const GoldenCopy copy(kStage2);
    fs::remove(copy.file("zero/2.bias/step.pt"));  // FusedAdam's steps are elsewhere
    copy.expect_refused<DataError>({"steps of '2.bias'", "2.bias/step.pt", "optimizer_state.pt"});
  }
  {
    const GoldenCopy copy(kStage2);
    std::ofstream(copy.path() + "/latest_universal") << "../elsewhere";
    copy.expect_refused<DataError>({"latest_universal", "../elsewhere"});
  }
  expect_error<DataError>([] { read_state(saved_by_deepspeed("")); },
                          {"universal checkpoint of DeepSpeed's", "ds_to_universal"});
}

TEST(DeepSpeedUniversal, NoMomentsAreAParameterThatNeverHadAGradient) {
  const GoldenCopy copy(kStage2);
  for (const char* name : {"exp_avg.pt", "exp_avg_sq.pt", "step.pt"})
    fs::remove(copy.file(std::string("zero/2.bias/") + name));
  const StateDict ours = read_state(copy.path());
  EXPECT_TRUE(elements_of(ours, "optimizer.state.2.bias.exp_avg").empty());
  EXPECT_FALSE(elements_of(ours, "optimizer.state.1.bias.exp_avg").empty());
}

TEST(DeepSpeedUniversal, NamesTheFileOfAnotherShape) {
  {
    const GoldenCopy copy(kStage2);
    fs::copy_file(copy.file("zero/1.bias/exp_avg.pt"), copy.file("zero/2.bias/exp_avg.pt"),
                  fs::copy_options::overwrite_existing);
    copy.expect_refused<DataError>({"[2] of '2.bias'", "2.bias/exp_avg.pt", "got [5]"});
  }
  {  // flat
    const GoldenCopy copy(kStage3);
    fs::copy_file(copy.file("zero/0.bias/fp32.pt"), copy.file("zero/0.weight/fp32.pt"),
                  fs::copy_options::overwrite_existing);
    copy.expect_refused<DataError>({"[3, 3] of '0.weight'", "0.weight/fp32.pt", "got [3]"});
  }
  {
    const GoldenCopy copy(kStage2);
    fs::copy_file(copy.file("zero/1.bias/step.pt"), copy.file("zero/1.bias/fp32.pt"),
                  fs::copy_options::overwrite_existing);
    copy.expect_refused<DataError>({"[5] of '1.bias'", "1.bias/fp32.pt", "got []"});
  }
}

/// 0.4 as a pickle writes it, and what it is replaced by.
std::string pickled(double value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  std::reverse(bytes.begin(), bytes.end());
  return "G" + bytes;
}

TEST(DeepSpeedUniversal, RefusesWhatItCannotMeanTheSameBy) {
  {
    const GoldenCopy copy(kStage2);
    copy.replace(kModelStates, pickled(0.4), pickled(0.5));
    copy.expect_refused<DataError>({"version 0.4 or older", kModelStates, "got 0.5"});
  }
  {
    const GoldenCopy copy(kStage2);
    copy.change(kModelStates, [](std::string& bytes) {
      const std::size_t name = bytes.find("mp_world_size");
      const std::size_t one = bytes.find("K\x01", name);
      ASSERT_LT(one - name, 32u);
      bytes[one + 1] = 2;
    });
    copy.expect_refused<DataError>({"tensor or pipeline parallelism", kModelStates});
  }
  {
    const GoldenCopy copy(kStage2);
    copy.change(kModelStates, [](std::string& bytes) {
      const std::size_t name = bytes.find("round_robin_gradients");
      const std::size_t no = bytes.find('\x89', name);
      ASSERT_LT(no - name, 32u);
      bytes[no] = '\x88';
    });
    copy.expect_refused<DataError>({"round_robin_gradients", kModelStates});
  }
  {
    const GoldenCopy copy(kStage2);
    copy.replace(kModelStates, "param_shapes", "param_shapeX");
    copy.expect_refused<DataError>({"param_shapes", kModelStates});
  }
  {  // a name that leads elsewhere
    const GoldenCopy copy(kStage2);
    copy.change(kModelStates, [](std::string& bytes) {
      for (std::size_t at = bytes.find("2.bias"); at != std::string::npos;
           at = bytes.find("2.bias", at)) {
        bytes.replace(at, 6, "../x/y");
      }
    });
    copy.expect_refused<DataError>({kModelStates});
  }
  {
    const GoldenCopy copy(kStage2);
    copy.replace("zero/optimizer_state.pt", "LossScaler", "LossScaleX");
    copy.expect_refused<DataError>({"LossScaleX", "nothing is executed", "optimizer_state.pt"});
  }
  {  // stage 3 has placeholders in the module: f16, of no elements
    const GoldenCopy copy(kStage3);
    copy.replace("zero_pp_rank_0_mp_rank_00_model_states.pt", "shared_params", "sharedXparams");
    copy.expect_refused<DataError>({"'2.weight'", "zero_pp_rank_0", "got [0]"});
  }
}

/// Hostile or damaged: whatever a byte says, nothing is read outside of the files.
TEST(DeepSpeedUniversal, AnyByteEndsInAnErrorOrAState) {
  for (const char* name : {kModelStates, "zero/optimizer_state.pt", "zero/1.weight/fp32.pt"}) {
    const GoldenCopy copy(kStage2);
    std::ifstream in(copy.file(name), std::ios::binary);
    const std::string intact(std::istreambuf_iterator<char>(in), {});
    int refused = 0;
    for (std::size_t at = 0; at < intact.size(); at += 5) {
      copy.change(name, [&](std::string& bytes) {
        bytes = intact;
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
      });
      try {
        for (const auto& [key, value] :
             flatten(read_deepspeed_universal(copy.path(), {.verify = false}))) {
          if (const auto* tensor = std::get_if<Tensor>(&value)) (void)tensor->to_vector();
        }
      } catch (const core::Error&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 20) << name;
  }
}

}  // namespace
}  // namespace cairn::checkpointing
