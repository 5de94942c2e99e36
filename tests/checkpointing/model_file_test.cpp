// Weights and optimizer states exchanged with PyTorch and Hugging Face.
#include "cairn/checkpointing/model_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optim.h"
#include "checkpointing/temporary_folder.h"
#include "support/near.h"
#include "support/step.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

using core::DataError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::string golden(const std::string& name) {
  return test::golden_file(name);
}

/// make_torch_files.py's. No bias before the batch norm: its gradient is rounding alone, which Adam
/// scales to a step.
nn::Sequential net() {
  return nn::Sequential(nn::Linear(4, 8, {.bias = false}), nn::BatchNorm1d(8), nn::Tanh(),
                        nn::Linear(8, 3));
}

void train(nn::Module& model, optim::Optimizer& optimizer, const Tensor& x, const Tensor& target,
           int steps) {
  for (int i = 0; i < steps; ++i) {
    autograd::backward(nn::mse_loss(model(x), target));
    test::expect_applied(optimizer.step());
  }
}

void expect_state_near(const nn::Module& model, const SafetensorsReader& expected,
                       const std::string& prefix) {
  int compared = 0;
  for (const auto& [name, value] : flatten(model.state_dict())) {
    test::expect_near(std::get<Tensor>(value).to_vector(), expected.read(prefix + name).to_vector(),
                      2e-6, name);
    ++compared;
  }
  EXPECT_EQ(compared, 7);
}

optim::FusedAdam adamw(nn::Sequential& model) {  // groups as make_torch_files.py's
  std::vector<optim::ParameterGroup> groups(2);
  for (const NamedTensor& entry : model.parameters()) {
    groups[entry.name.starts_with("0.") ? 0 : 1].parameters.push_back(entry);
  }
  return optim::FusedAdam(std::move(groups), {.lr = 1e-2, .weight_decay = 0.1});
}

TEST(ModelFile, TrainingThatPyTorchBeganGoesOn) {
  const SafetensorsReader expected(golden("torch_files.safetensors"));
  const core::Device here = core::default_device();
  const Tensor x = autograd::to(expected.read("x"), here),
               target = autograd::to(expected.read("target"), here);
  {
    nn::Sequential model = net();
    optim::FusedAdam optimizer = adamw(model);
    const LoadReport report = load(model, golden("torch_training.pt"), {.part = "model"});
    EXPECT_EQ(report.loaded.size(), 7u);
    EXPECT_THAT(report.surplus, IsEmpty()) << "num_batches_tracked is taken for granted";
    optimizer.load_torch_state_dict(read_torch(golden("torch_training.pt")).dict("optimizer"));
    train(model, optimizer, x, target, 3);
    expect_state_near(model, expected, "weight8.");
  }
  nn::Sequential model = net();
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1, .momentum = 0.9});
  load(model, golden("torch_sgd.pt"), {.part = "model"});
  optimizer.load_torch_state_dict(read_torch(golden("torch_sgd.pt")).dict("optimizer"));
  train(model, optimizer, x, target, 3);
  expect_state_near(model, expected, "sgd8.");
}

TEST(ModelFile, EverythingThatDiffersIsNamedAtOnce) {
  const TemporaryFolder folder;
  nn::Sequential model = net();
  const auto before = flatten(model.state_dict());
  StateDict other = model.state_dict();
  const Tensor bias = Tensor::full({8, 4}, 7.0);
  std::get<StateDict>(*other.find("0")).set("weight", bias);
  std::get<StateDict>(*other.find("1")).set("bias", Tensor::zeros({9}));
  std::get<StateDict>(*other.find("3")).set("scale", Tensor::zeros({1}));
  StateDict last;
  last.set("weight", other.dict("3").tensor("weight"));
  last.set("scale", Tensor::zeros({1}));
  other.set("3", last);
  write_torch(folder / "x.pt", other);
  const std::string message = message_of<DataError>([&] { load(model, folder / "x.pt"); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("'1.bias' [9] instead of [8]"), HasSubstr("missing: '3.bias'"),
                    HasSubstr("surplus: '3.scale'"), HasSubstr("x.pt")));
  EXPECT_THAT(message_of<DataError>([&] { load(model, folder / "x.pt", {.strict = false}); }),
              AllOf(HasSubstr("'1.bias' [9]"), Not(HasSubstr("3.bias"))));
  EXPECT_NE(model.parameters()[0].tensor.to_vector(), bias.to_vector()) << "nothing has changed";

  std::get<StateDict>(*other.find("1")).set("bias", Tensor::full({8}, 5.0));
  write_torch(folder / "x.pt", other);
  const LoadReport report = load(model, folder / "x.pt", {.strict = false});
  EXPECT_THAT(report.missing, ElementsAre("3.bias"));
  EXPECT_THAT(report.surplus, ElementsAre("3.scale"));
  EXPECT_EQ(model.parameters()[0].tensor.to_vector(), bias.to_vector());
  EXPECT_EQ(model.parameters()[2].tensor.to_vector()[0], 5);
  EXPECT_THAT(message_of<DataError>([&] { load(model, folder / "x.pt", {.part = "model"}); }),
              AllOf(HasSubstr("a dictionary 'model'"), HasSubstr("'0', '1', '3'")));
}

TEST(ModelFile, NamesAreMapped) {
  const TemporaryFolder folder;
  nn::Sequential model = net(), copy = net();
  StateDict wrapped;
  wrapped.make_dict("state_dict").set("module", model.state_dict());
  write_torch(folder / "x.pt", wrapped);
  load(copy, folder / "x.pt", {.part = "state_dict", .names = {{"module.", ""}}});
  EXPECT_EQ(copy.parameters()[0].tensor.to_vector(), model.parameters()[0].tensor.to_vector());
  EXPECT_THAT(message_of<DataError>([&] {
                load(copy, folder / "x.pt",
                     {.part = "state_dict", .names = {{"module.0.", "3."}, {"module.", ""}}});
              }),
              HasSubstr("twice"));
}

TEST(ModelFile, ASecondNameOfAWeightIsNoSurplus) {
  const TemporaryFolder folder;
  nn::Sequential model = net(), copy = net();
  StateDict tied = model.state_dict();
  tied.make_dict("head").set("weight", tied.dict("0").tensor("weight"));
  write_torch(folder / "x.pt", tied);
  write_safetensors_model(folder / "x", tied);
  for (const std::string& path : {folder / "x.pt", folder / "x"}) {
    const LoadReport report = load(copy, path);
    EXPECT_EQ(report.loaded.size(), 7u) << path;
    EXPECT_THAT(report.surplus, IsEmpty()) << path;
  }
}

TEST(ModelFile, ATensorOfTheFileDoesNotReplaceANumber) {
  const TemporaryFolder folder;
  std::int64_t steps = 3;
  Variables counted({{"steps", steps}});
  StateDict other;
  other.set("steps", Tensor::zeros({2}));
  write_torch(folder / "x.pt", other);
  EXPECT_THAT(message_of<DataError>([&] { load(counted, folder / "x.pt"); }),
              HasSubstr("'steps' [2] instead of no tensor"));
  EXPECT_EQ(steps, 3);
}

TEST(ModelFile, EveryKindOfFileLoads) {
  const TemporaryFolder folder;
  nn::Sequential model = net();
  write_torch(folder / "x.pt", model.state_dict());
  write_safetensors_model(folder / "one", model.state_dict());
  write_safetensors_model(folder / "many", model.state_dict(), {.file_bytes = 100});
  const std::string step = TrainingState({{"model", model}}).save(folder / "run", 3);
  EXPECT_EQ(kind_of_file(folder / "x.pt"), FileKind::torch);
  EXPECT_EQ(kind_of_file(folder / "one"), FileKind::safetensors_model);
  EXPECT_EQ(kind_of_file(folder / "one/model.safetensors"), FileKind::safetensors);
  EXPECT_EQ(kind_of_file(folder / "many/model.safetensors.index.json"),
            FileKind::safetensors_model);
  EXPECT_EQ(kind_of_file(folder / "run"), FileKind::checkpoint);
  for (const std::string& path : {folder / "x.pt", folder / "one", folder / "one/model.safetensors",
                                  folder / "many", folder / "many/model.safetensors.index.json"}) {
    nn::Sequential copy = net();
    EXPECT_EQ(load(copy, path).loaded.size(), 7u) << path;
    EXPECT_EQ(copy.parameters()[3].tensor.to_vector(), model.parameters()[3].tensor.to_vector())
        << path;
  }
  for (const std::string& path : {folder / "run", step}) {
    nn::Sequential copy = net();
    EXPECT_EQ(load(copy, path, {.part = "model"}).loaded.size(), 7u) << path;
  }
  write_bytes(folder / "text", "hello, world");
  EXPECT_THAT(message_of<DataError>([&] { kind_of_file(folder / "text"); }),
              HasSubstr("none of them"));
  EXPECT_THROW(kind_of_file(folder / "nothing"), core::IoError);
}

TEST(ModelFile, HuggingFaceLayout) {
  const TemporaryFolder folder;
  StateDict state, wte, head;
  wte.set("weight", Tensor::from<float>({1, 2, 3, 4}, {2, 2}, DType::bf16));
  head.set("weight", wte.tensor("weight"));
  state.set("wte", wte);
  state.make_dict("h").make_dict("0").set("bias", Tensor::full({3}, 0.5));
  state.set("lm_head", head);
  write_safetensors_model(folder / "x", state, {.file_bytes = 8});
  const auto index = nlohmann::json::parse(read_bytes(folder / "x/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 8 + 12);
  EXPECT_EQ(index["weight_map"].size(), 2u);
  EXPECT_EQ(index["weight_map"]["wte.weight"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"]["h.0.bias"], "model-00002-of-00002.safetensors");
  const SafetensorsReader first(folder / "x/model-00001-of-00002.safetensors");
  EXPECT_THAT(first.metadata(), UnorderedElementsAre(std::pair("format", "pt"),
                                                     std::pair("lm_head.weight", "wte.weight")));
  EXPECT_EQ(first.read("wte.weight").dtype(), DType::bf16);

  const StateDict read = read_state(folder / "x");
  EXPECT_EQ(read.dict("lm_head").tensor("weight").raw_data(),
            read.dict("wte").tensor("weight").raw_data());
  EXPECT_THAT(read.dict("h").dict("0").tensor("bias").to_vector(), ElementsAre(0.5, 0.5, 0.5));
}

TEST(ModelFile, DamagedIndexesAreRefused) {
  const TemporaryFolder folder;
  nn::Sequential model = net();
  write_safetensors_model(folder / "x", model.state_dict(), {.file_bytes = 100});
  const std::string path = folder / "x/model.safetensors.index.json";
  const auto good = nlohmann::json::parse(read_bytes(path));
  const auto message_with = [&](const auto& change) {
    auto json = good;
    change(json);
    write_bytes(path, json.dump());
    return message_of<DataError>([&] { read_state(folder / "x"); });
  };
  EXPECT_THAT(message_with([](auto& j) { j["weight_map"]["more"] = j["weight_map"]["0.weight"]; }),
              HasSubstr("'more' is missing"));
  EXPECT_THAT(message_with([](auto& j) { j["weight_map"]["0.weight"] = "../model.safetensors"; }),
              HasSubstr("'0.weight'"));
  EXPECT_THAT(message_with([](auto& j) { j["weight_map"]["0.weight"] = 5; }), HasSubstr("got 5"));
  EXPECT_THAT(message_with([](auto& j) { j["weight_map"]["0.weight"] = "none"; }),
              HasSubstr("'none' is missing"));
  EXPECT_THAT(message_with([](auto& j) { j["weight_map"].erase("1.bias"); }),
              HasSubstr("'1.bias'"));
  EXPECT_THAT(message_with([](auto& j) { j.erase("weight_map"); }), HasSubstr("a weight_map"));
  EXPECT_THAT(message_with([](auto& j) { j = 5; }), HasSubstr("a weight_map"));
}

// ---- with PyTorch itself, where CAIRN_TORCH_PYTHON names a Python that has torch and safetensors

class WithTorch : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const char* python = std::getenv("CAIRN_TORCH_PYTHON");
    if (python == nullptr) GTEST_SKIP() << "CAIRN_TORCH_PYTHON names no Python with torch";
    python_ = python;
  }
  void run(const std::string& what) const {
    const std::string command =
        core::str(python_, " ", test::test_folder(), "/checkpointing/torch_both_ways.py ", what,
                  " ", GetParam(), " ", folder_.string());
    ASSERT_EQ(std::system(command.c_str()), 0) << command;  // NOLINT: a fixed command
  }
  std::string python_;
  TemporaryFolder folder_;
};

TEST_P(WithTorch, NextStepsAreEqualBothWays) {
  run("begin");  // writes begin.pt and what torch has three steps later
  nn::Sequential model = net();
  std::unique_ptr<optim::Optimizer> optimizer;
  if (GetParam() == std::string("adamw")) {
    optimizer = std::make_unique<optim::FusedAdam>(model.parameters());
  } else {
    optimizer = std::make_unique<optim::FusedSGD>(model.parameters(),
                                                  optim::SgdOptions{.lr = 1, .momentum = 0.9});
  }
  load(model, folder_ / "begin.pt", {.part = "model"});
  optimizer->load_torch_state_dict(read_torch(folder_ / "begin.pt").dict("optimizer"));
  const SafetensorsReader then(folder_ / "then.safetensors");
  const Tensor x = then.read("x"), target = then.read("target");
  train(model, *optimizer, x, target, 3);
  expect_state_near(model, then, "");

  write_torch(folder_ / "ours.pt",
              {{"model", model.state_dict()}, {"optimizer", optimizer->torch_state_dict()}});
  write_safetensors_model(folder_ / "ours", model.state_dict(), {.file_bytes = 100});
  run("continue");  // three more steps from each of the two
  train(model, *optimizer, x, target, 3);
  expect_state_near(model, SafetensorsReader(folder_ / "end.safetensors"), "");
}
INSTANTIATE_TEST_SUITE_P(ModelFile, WithTorch, testing::Values("adamw", "sgd"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace cairn::checkpointing
