// cairn-ckpt, run as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/optim.h"
#include "shell.h"
#include "support/test_folder.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

ShellResult ckpt(const std::string& arguments) {
  return shell(std::string(CAIRN_CKPT_PROGRAM) + " " + arguments);
}

struct Model : core::Stateful {
  Tensor weight = Tensor::from<float>({1, 2, 3, 4}, {2, 2});
  double scale = 0.1;
  std::int64_t steps = 3;
  std::string level = "O2";

  StateDict state_dict() const override {
    StateDict state;
    state.set("weight", weight);
    state.set("scale", scale);
    state.set("steps", steps);
    state.set("level", level);
    return state;
  }
  void load_state_dict(const StateDict&) override {}
};

class CairnCkpt : public testing::Test {
 protected:
  std::string save(const std::string& dir, std::int64_t step) {
    return checkpointing::TrainingState({{"model", model_}}).save((folder_ / dir).string(), step);
  }
  static void flip_last_byte(const std::string& path) {
    std::string bytes = read_text(path);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    std::ofstream(path, std::ios::binary) << bytes;
  }
  TemporaryFolder folder_;
  Model model_;
};

TEST_F(CairnCkpt, ExplainsItself) {
  const ShellResult result = ckpt("--help");
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("inspect"), HasSubstr("convert"), HasSubstr("prove-resume")));
}

TEST_F(CairnCkpt, WrongUsageIsOneLineAndStatus2) {
  for (const std::string arguments :
       {"", "inspect", "inspect /no/such/path", "verify --fast /tmp", "diff /tmp", "repair /tmp"}) {
    const ShellResult result = ckpt(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST_F(CairnCkpt, AsksWhetherSomethingAlikeWasMeant) {
  EXPECT_EQ(
      ckpt("inspcet /tmp").err,
      "cairn-ckpt: unknown command 'inspcet': did you mean inspect? (see cairn-ckpt --help)\n");
  EXPECT_EQ(ckpt("prune /tmp --keepbest 3").err,
            "cairn-ckpt: unknown flag '--keepbest': did you mean --keep-best? (see cairn-ckpt "
            "--help)\n");
  EXPECT_THAT(ckpt("inspect /tmp --nothing-like-it").err,
              HasSubstr("unknown flag '--nothing-like-it' (see"));
}

TEST_F(CairnCkpt, InspectListsEveryEntry) {
  manual_seed(77);
  save("run", 5);
  const ShellResult result = ckpt("inspect " + folder_.string() + "/run");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("step 5, saved by 1 rank"), HasSubstr("model.weight"), HasSubstr("[2, 2]"),
            HasSubstr("16 bytes"), HasSubstr("0.10000000000000001"), HasSubstr("\"O2\""),
            HasSubstr("rank-0.generator.seed"), HasSubstr("77"), HasSubstr("model: 4 entries")));
}

TEST_F(CairnCkpt, VerifyNamesTheDamage) {
  save("run", 5);
  const std::string newest = save("run", 6);
  EXPECT_EQ(ckpt("verify " + folder_.string() + "/run").status, 0);
  flip_last_byte(newest + "/state.safetensors");
  const ShellResult result = ckpt("verify " + folder_.string() + "/run");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("step-00000005: good"),
                                HasSubstr("step-00000006: damaged"), HasSubstr("'model.")));
  EXPECT_EQ(ckpt("verify " + newest).status, 1);
  EXPECT_EQ(ckpt("inspect " + newest).status, 1);
}

TEST_F(CairnCkpt, VerifyTellsWhatCannotBeReadFromDamage) {
  const std::string path = save("run", 5);
  std::filesystem::remove(path + "/rank-0.safetensors");
  EXPECT_THAT(ckpt("verify " + path).out, HasSubstr("step-00000005: damaged"));
  std::filesystem::create_symlink("rank-0.safetensors", path + "/rank-0.safetensors");  // of itself
  const ShellResult result = ckpt("verify " + path);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, HasSubstr("step-00000005: cannot be read"));
}

TEST_F(CairnCkpt, VerifyPrintsNoControlCharacters) {
  const std::string folder = (folder_ / "hostile").string(), name = "a\x1b[2J\xc2\x9b.safetensors";
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/model.safetensors.index.json")
      << R"({"weight_map": {"w\u001b[2J\u009b": "a\u001b[2J\u009b.safetensors"}})";
  for (const std::string bytes : {"", "short", "{"}) {
    if (!bytes.empty()) std::ofstream(folder + "/" + name) << bytes;
    for (const std::string command : {"verify ", "inspect "}) {
      const ShellResult result = ckpt(command + folder);
      EXPECT_EQ(result.status, 1);
      EXPECT_THAT(result.out + result.err, AllOf(HasSubstr("a\\x1b[2J\\xc2\\x9b"),
                                                 Not(HasSubstr("\x1b")), Not(HasSubstr("\xc2"))));
    }
  }
}

TEST_F(CairnCkpt, DiffNamesWhatDiffers) {
  const std::string a = save("a", 5);
  const std::string b = save("b", 5);
  const ShellResult equal = ckpt("diff " + a + " " + b);
  EXPECT_EQ(equal.status, 0) << equal.out;
  EXPECT_THAT(equal.out, HasSubstr("equal: 8 entries, bit for bit"));

  model_.weight.data<float>()[2] = 3.5f;
  model_.scale = std::nextafter(0.1, 1);
  model_.level = "O1";
  const std::string c = save("c", 5);
  const ShellResult result = ckpt("diff " + a + " " + c);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("model.weight: 1 of 4 elements differ, by at most 0.5; first at 2: 3 "
                              "and 3.5"),
                    HasSubstr("model.scale: 0.1000000000000000"),
                    HasSubstr("model.level: \"O2\" and \"O1\""), Not(HasSubstr("model.steps")),
                    HasSubstr("3 of 8 entries differ")));
  const ShellResult steps = ckpt("diff " + a + " " + save("a", 6));
  EXPECT_EQ(steps.status, 1);
  EXPECT_THAT(steps.out, HasSubstr("(step): 5 and 6"));
}

TEST_F(CairnCkpt, ShowsNoControlCharacters) {
  model_.level = "O2\x1b[2J\r\n\x7f";
  const std::string a = save("a", 5);
  model_.level = "O\a";
  const std::string b = save("b", 5);
  for (const std::string& command : {"inspect " + a, "diff " + a + " " + b}) {
    const std::string out = ckpt(command).out;
    EXPECT_THAT(out, HasSubstr("\"O2\\x1b[2J\\x0d\\x0a\\x7f\""));
    EXPECT_EQ(out.find('\x1b'), std::string::npos);
  }
}

TEST_F(CairnCkpt, SafetensorsFilesToo) {
  const std::string a = (folder_ / "a.safetensors").string();
  const std::string b = (folder_ / "b.safetensors").string();
  const Tensor x = Tensor::zeros({2});
  checkpointing::write_safetensors(a, {{"x", x}, {"y", x}});
  checkpointing::write_safetensors(b, {{"x", Tensor::zeros({3})}, {"z", x}});
  EXPECT_EQ(ckpt("verify " + a).status, 0);
  EXPECT_THAT(ckpt("inspect " + a).out, AllOf(HasSubstr("x"), HasSubstr("[2]")));
  const ShellResult result = ckpt("diff " + a + " " + b);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("x: f32 [2] and f32 [3]"), HasSubstr("y: only in " + a),
                                HasSubstr("z: only in " + b)));
  std::filesystem::resize_file(a, 20);
  EXPECT_EQ(ckpt("verify " + a).status, 1);
}

TEST_F(CairnCkpt, AFolderWithoutCheckpointsIsAnError) {
  const ShellResult result = ckpt("verify " + folder_.string());
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("expected a checkpoint"));
}

// ---- other people's files

nn::Sequential net() {  // make_torch_files.py's
  return nn::Sequential(nn::Linear(4, 8, {.bias = false}), nn::BatchNorm1d(8), nn::Tanh(),
                        nn::Linear(8, 3));
}

TEST_F(CairnCkpt, FilesOfPyTorchAndHuggingFaceToo) {
  const std::string out = folder_.string();
  const std::string file = test::golden_file("torch_training.pt");
  EXPECT_EQ(ckpt("verify " + file).status, 0);
  EXPECT_THAT(ckpt("inspect " + file).out,
              AllOf(HasSubstr("model.0.weight"), HasSubstr("optimizer.state.0.exp_avg"),
                    HasSubstr("epoch"), HasSubstr("model: 8 entries")));
  ASSERT_EQ(ckpt("convert " + file + " " + out + "/model --part model").status, 0);
  ASSERT_EQ(ckpt("convert " + out + "/model " + out + "/model.pt").status, 0);
  ASSERT_EQ(ckpt("convert " + out + "/model.pt " + out + "/model.safetensors").status, 0);
  EXPECT_EQ(ckpt("diff " + out + "/model " + out + "/model.safetensors").status, 0);
  EXPECT_THAT(ckpt("diff " + out + "/model " + out + "/model.pt").out,
              HasSubstr("equal: 8 entries"));
  EXPECT_THAT(ckpt("convert " + file + " " + out + "/model.pt").err, HasSubstr("exists"));
  flip_last_byte(out + "/model.pt");
  EXPECT_EQ(ckpt("inspect " + file + "x").status, 2);
  std::string bytes = read_text(out + "/model.pt");
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  std::ofstream(out + "/model.pt", std::ios::binary) << bytes;
  EXPECT_EQ(ckpt("verify " + out + "/model.pt").status, 1);
}

TEST_F(CairnCkpt, ATrainingOfPyTorchsBecomesACheckpointAndBack) {
  const std::string step = folder_.string() + "/run/step-00000005";
  const ShellResult made = ckpt("convert " + test::golden_file("torch_sgd.pt") + " " + step);
  ASSERT_EQ(made.status, 0) << made.err;
  nn::Sequential model = net(), straight = net();
  optim::FusedSGD optimizer(model.parameters(), {.lr = 1, .momentum = 0.9});
  optim::FusedSGD same(straight.parameters(), {.lr = 1, .momentum = 0.9});
  checkpointing::TrainingState state({{"model", model}, {"optimizer", optimizer}});
  EXPECT_EQ(state.resume_latest(folder_.string() + "/run")->step, 5);
  checkpointing::load(straight, test::golden_file("torch_sgd.pt"), {.part = "model"});
  same.load_torch_state_dict(
      checkpointing::read_torch(test::golden_file("torch_sgd.pt")).dict("optimizer"));
  const auto left = checkpointing::flatten(optimizer.state_dict()),
             right = checkpointing::flatten(same.state_dict());
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    if (const auto* x = std::get_if<Tensor>(&left[i].second)) {
      EXPECT_EQ(x->to_vector(), std::get<Tensor>(right[i].second).to_vector()) << left[i].first;
    }
  }
  const std::string back = folder_.string() + "/back.pt";
  ASSERT_EQ(ckpt("convert " + step + " " + back).status, 0);
  const ShellResult diff = ckpt("diff " + test::golden_file("torch_sgd.pt") + " " + back);
  for (const std::string line : {"exp", "momentum_buffer", "weight:", "bias:", "lr", "momentum:"}) {
    EXPECT_THAT(diff.out, Not(HasSubstr(line))) << "only what torch alone has may differ";
  }
}

TEST_F(CairnCkpt, ATrainingOfTorchsManyRanksBecomesACheckpoint) {
  const std::string step = folder_.string() + "/run/step-00000002";
  const ShellResult made = ckpt("convert " + test::golden_file("torch_distributed") + " " + step);
  ASSERT_EQ(made.status, 0) << made.err;
  nn::Sequential model(nn::Linear(3, 5), nn::Tanh{});
  optim::FusedAdam optimizer(model.parameters(), {.beta1 = 0.8, .beta2 = 0.95});
  checkpointing::TrainingState state({{"model", model}, {"optimizer", optimizer}});
  const auto resumed = state.resume_latest(folder_.string() + "/run", {.strict = false});
  EXPECT_EQ(resumed->step, 2);
  const StateDict theirs =
      checkpointing::read_torch_distributed(test::golden_file("torch_distributed"));
  const auto moment = [](const StateDict& optimizer_state) {
    const StateDict& entry = optimizer_state.dict("state").dict("0").dict("weight");
    return std::get<Tensor>(*entry.find("exp_avg")).to_vector();
  };
  EXPECT_EQ(moment(optimizer.state_dict()), moment(theirs.dict("optimizer")));
}

// Its groups are of names.
TEST_F(CairnCkpt, ATrainingOfDeepSpeedsBecomesACheckpoint) {
  const std::string theirs = test::golden_file("deepspeed_universal/stage3_f16");
  const std::string step = folder_.string() + "/run/step-00000002";
  const ShellResult made = ckpt("convert " + theirs + " " + step);
  ASSERT_EQ(made.status, 0) << made.err;
  nn::Sequential model(nn::Linear(3, 3), nn::Tanh{}, nn::Linear(3, 3, {.bias = false}));
  const NamedTensors all = model.parameters();
  optim::FusedAdam optimizer({{.parameters = {all[0]}}, {.parameters = {all[1]}}},
                             optim::AdamOptions{.beta1 = 0.8, .beta2 = 0.95});
  checkpointing::TrainingState state({{"model", model}, {"optimizer", optimizer}});
  const auto resumed = state.resume_latest(folder_.string() + "/run", {.strict = false});
  EXPECT_EQ(resumed->step, 2);
  const StateDict read = checkpointing::read_deepspeed_universal(theirs);
  const auto moment = [](const StateDict& optimizer_state) {
    const StateDict& entry = optimizer_state.dict("state").dict("0").dict("bias");
    return std::get<Tensor>(*entry.find("exp_avg")).to_vector();
  };
  EXPECT_EQ(moment(optimizer.state_dict()), moment(read.dict("optimizer")));
  EXPECT_EQ(optimizer.groups()[1].lr, 2e-2);
}

// Two groups of AdamW's, which the shapes tell apart.
TEST_F(CairnCkpt, ParameterGroupsArePutTogetherAgain) {
  const std::string file = test::golden_file("torch_training.pt");
  const std::string step = folder_.string() + "/run/step-00000005";
  const ShellResult made = ckpt("convert " + file + " " + step);
  ASSERT_EQ(made.status, 0) << made.err;
  const auto optimizer_of = [](const nn::Sequential& model) {
    const NamedTensors all = model.parameters();
    return optim::FusedAdam(
        {{.parameters = {all[0]}}, {.parameters = {all.begin() + 1, all.end()}}},
        optim::AdamOptions{});
  };
  nn::Sequential model = net(), straight = net();
  optim::FusedAdam optimizer = optimizer_of(model), same = optimizer_of(straight);
  optimizer.load_state_dict(checkpointing::read_checkpoint(step).dict("optimizer"));
  same.load_torch_state_dict(checkpointing::read_torch(file).dict("optimizer"));
  const auto left = checkpointing::flatten(optimizer.state_dict()),
             right = checkpointing::flatten(same.state_dict());
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    if (const auto* x = std::get_if<Tensor>(&left[i].second)) {
      EXPECT_EQ(x->to_vector(), std::get<Tensor>(right[i].second).to_vector()) << left[i].first;
    } else if (const auto* number = std::get_if<double>(&left[i].second)) {
      EXPECT_EQ(*number, std::get<double>(right[i].second)) << left[i].first;
    }
  }
  const std::string back = folder_.string() + "/back.pt";
  ASSERT_EQ(ckpt("convert " + step + " " + back).status, 0);
  const std::string diff = ckpt("diff " + file + " " + back).out;
  for (const std::string line : {"exp_avg", "params", "lr:", "betas", "weight_decay:"}) {
    EXPECT_THAT(diff, Not(HasSubstr(line))) << "only what torch alone has may differ";
  }
}

// Two parameters of one shape: only names tell.
TEST_F(CairnCkpt, ParameterGroupsThatCannotBeToldApartAreRefused) {
  const Tensor x = Tensor::zeros({2});
  StateDict model, optimizer;
  model.set("a", x);
  model.set("b", x);
  for (const std::string name : {"b", "a"}) {
    const std::int64_t index = name == "b" ? 0 : 1;
    StateDict& group = optimizer.make_dict("param_groups").make_dict(std::to_string(index));
    group.set("lr", 0.5 + static_cast<double>(index));
    group.set("weight_decay", 0.0);
    group.set("momentum", 0.9);
    group.make_dict("params").set("0", index);
    optimizer.make_dict("state")
        .make_dict(std::to_string(index))
        .set("momentum_buffer", Tensor::full({2}, index));
  }
  const std::string file = folder_.string() + "/a.pt", named = folder_.string() + "/b.pt";
  checkpointing::write_torch(file, {{"model", model}, {"optimizer", optimizer}});
  const ShellResult refused = ckpt("convert " + file + " " + folder_.string() + "/x/step-00000001");
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.err, HasSubstr("2 that they fit in several ways"));
  for (const std::string name : {"b", "a"}) {
    StateDict& groups = optimizer.make_dict("param_groups");
    groups.make_dict(name == "b" ? "0" : "1").make_dict("param_names").set("0", name);
  }
  checkpointing::write_torch(named, {{"model", model}, {"optimizer", optimizer}});
  const std::string step = folder_.string() + "/y/step-00000001";
  const ShellResult taken = ckpt("convert " + named + " " + step);
  ASSERT_EQ(taken.status, 0) << taken.err;
  const StateDict state = checkpointing::read_checkpoint(step).dict("optimizer").dict("state");
  EXPECT_EQ(state.dict("a").tensor("momentum_buffer").to_vector()[0], 1);
  EXPECT_EQ(state.dict("b").tensor("momentum_buffer").to_vector()[0], 0);
}

// ---- several ranks

struct RankModel : core::Stateful {
  explicit RankModel(int rank)
      : rows(Tensor::full({rank == 0 ? 3 : 1, 2}, rank)), begin(3 * rank) {}
  Tensor rows;
  std::int64_t begin;
  StateDict state_dict() const override {
    StateDict state;
    state.set("cut", Shard{rows, {4, 2}, begin});
    state.set("scale", 0.25);
    return state;
  }
  void load_state_dict(const StateDict& state) override { rows = state.shard("cut").tensor; }
};

TEST_F(CairnCkpt, MergesAndReshards) {
  const std::string dir = folder_.string();
  std::vector<std::string> seen(2);
  std::barrier<> meets(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      RankModel model(rank);
      World world(rank, 2, [&, rank](const std::string& value, std::string_view) {
        meets.arrive_and_wait();
        seen[static_cast<std::size_t>(rank)] = value;
        meets.arrive_and_wait();
        return seen;
      });
      checkpointing::TrainingState({{"model", model}}, world).save(dir + "/run", 7);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const ShellResult merged = ckpt("merge " + dir + "/run " + dir + "/one");
  EXPECT_EQ(merged.status, 0) << merged.err;
  EXPECT_THAT(merged.out, HasSubstr("1 rank(s), 3 entries, bit for bit the same"));
  const ShellResult cut = ckpt("reshard " + dir + "/run " + dir + "/three/step-00000007 --world 3");
  EXPECT_EQ(cut.status, 0) << cut.err;
  for (const std::string made : {"/one", "/three"}) {
    EXPECT_EQ(ckpt("verify " + dir + made).status, 0);
    const StateDict state = checkpointing::read_checkpoint(dir + made + "/step-00000007");
    EXPECT_EQ(state.dict("model").tensor("cut").to_vector(),
              (std::vector<double>{0, 0, 0, 0, 0, 0, 1, 1}));
  }
  EXPECT_THAT(ckpt("inspect " + dir + "/three").out, HasSubstr("saved by 3 rank(s)"));
  EXPECT_EQ(ckpt("reshard " + dir + "/run " + dir + "/one --world 0").status, 2);
  EXPECT_THAT(ckpt("reshard " + dir + "/run " + dir + "/one --world 2").err, HasSubstr("exists"));
  flip_last_byte(dir + "/run/step-00000007/rank-1.safetensors");
  EXPECT_THAT(ckpt("merge " + dir + "/run " + dir + "/again").err, HasSubstr("rank-1.safetensors"));
}

TEST_F(CairnCkpt, PruneKeepsTheNewestGoodOnes) {
  const std::string dir = folder_.string() + "/run";
  {
    checkpointing::TrainingState state({{"model", model_}}, {}, {.keep = 10});
    for (int step = 1; step <= 5; ++step) state.save(dir, step);
  }
  flip_last_byte(dir + "/step-00000005/state.safetensors");
  EXPECT_THAT(ckpt("prune --dry-run --keep 2 " + dir).out, HasSubstr("step-00000002: would go"));
  EXPECT_EQ(ckpt("prune --keep 2 " + dir).status, 0);
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().filename() != ".lock") left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left,
              testing::UnorderedElementsAre("step-00000005", "step-00000004", "step-00000003"))
      << "a damaged one does not count";
  EXPECT_EQ(ckpt("prune " + folder_.string()).status, 1);
}

TEST_F(CairnCkpt, PruneKeepsTheBestAndWaitsForNobodyWhoSaves) {
  const std::string dir = folder_.string() + "/run";
  {
    checkpointing::TrainingState state({{"model", model_}}, {}, {.keep = 10});
    for (int step = 1; step <= 6; ++step) state.save(dir, step, step == 2 ? 0.5 : step);
    const ShellResult busy = ckpt("prune --keep 1 " + dir);  // this process has the lock
    EXPECT_EQ(busy.status, 1);
    EXPECT_THAT(busy.err, HasSubstr("expected to be the only one that saves"));
    EXPECT_THAT(ckpt("prune --dry-run --keep 1 " + dir).out, HasSubstr("step-00000005: would go"));
    EXPECT_EQ(checkpointing::list_checkpoints(dir).size(), 6u);
  }
  EXPECT_EQ(ckpt("prune --keep 1 --keep-best 1 " + dir).status, 2);  // the best by what?
  EXPECT_EQ(ckpt("prune --keep 1 --best middle --keep-best 1 " + dir).status, 2);
  EXPECT_EQ(checkpointing::list_checkpoints(dir).size(), 6u);
  EXPECT_EQ(ckpt("prune --keep 1 --keep-best 1 --best lowest --keep-every 4 " + dir).status, 0);
  std::vector<std::string> left;
  for (const std::string& path : checkpointing::list_checkpoints(dir)) {
    left.push_back(path.substr(dir.size() + 1));
  }
  EXPECT_THAT(left, testing::ElementsAre("step-00000006", "step-00000004", "step-00000002"));
}

TEST_F(CairnCkpt, RepairSavesWhatCanBeReadAndNamesTheRest) {
  const std::string step = save("run", 6);
  flip_last_byte(step + "/state.safetensors");
  const std::string out = folder_.string() + "/mended.safetensors";
  const ShellResult result = ckpt("repair " + step + " " + out);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("lost: "), HasSubstr("3 good entries")));
  const ShellResult diff = ckpt("diff " + save("good", 6) + " " + out);
  EXPECT_THAT(diff.out, HasSubstr("only in")) << "one entry is lost";
  EXPECT_THAT(diff.out, Not(HasSubstr("elements differ")));

  std::ofstream(step + "/manifest.json") << "{";
  const ShellResult unlisted = ckpt("repair " + step + " " + folder_.string() + "/all.safetensors");
  EXPECT_THAT(unlisted.out, AllOf(HasSubstr("expected JSON"), HasSubstr("3 good entries")));
}

// A "training" whose state after step s is a file made before: resumes after the newest step there.
class ProveResume : public CairnCkpt {
 protected:
  void SetUp() override {
    for (int step = 1; step <= 6; ++step) {
      checkpointing::write_safetensors(
          (folder_ / ("w" + std::to_string(step) + ".safetensors")).string(),
          {{"x", Tensor::full({2}, step)}, {"y", Tensor::full({1}, 7)}});
    }
  }
  std::string program(const std::string& file_of_step) {
    const std::string path = (folder_ / "train.sh").string();
    std::ofstream(path) << "#!/bin/bash\nset -e\n"
                        << "cd '" << folder_.string() << "'\nmkdir -p \"$2\"\n"
                        << "first=$(ls \"$2\" | wc -l)\n"
                        << "for ((s = first + 1; s <= 6; s++)); do\n  " << file_of_step << "\n  "
                        << CAIRN_CKPT_PROGRAM
                        << " convert w$w.safetensors $2/step-0000000$s\n  sleep 0.05\ndone\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
};

TEST_F(ProveResume, SaysBitExact) {
  const ShellResult result = ckpt("prove-resume --kill-at 2 -- " + program("w=$s"));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("killed: after the checkpoint of step"),
                                HasSubstr("resume: bit-exact")));
}

TEST_F(ProveResume, NamesTheFirstTensorAndStepThatDiffer) {
  const ShellResult result = ckpt("prove-resume --kill-at 2 --out " + (folder_ / "out").string() +
                                  " -- " + program("w=$s; ((first > 0 && s >= 5)) && w=1"));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("differs first at step 5, in model.x: 2 of 2 elements"),
                                HasSubstr("by at most 4 in model.x")));
}

// It makes all checkpoints again, each as it was.
TEST_F(ProveResume, SeesAProgramThatNeverResumes) {
  const ShellResult result =
      ckpt("prove-resume --kill-at 2 -- " +
           program("[[ -z $anew ]] && rm -rf $2/step-* && s=1; anew=1; w=$s"));
  EXPECT_EQ(result.status, 1) << result.out;
  EXPECT_THAT(result.err, HasSubstr("got one that began anew"));
}

// A real training that clears its folder at each start and keeps one checkpoint: what stands at its
// end, its line of saves too, is bit for bit what a resumed one would leave. Run by the test below.
TEST(TrainingProgram, DISABLED_BeginsAnew) {
  const std::string dir = std::getenv("CAIRN_TEST_DIR");
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    std::filesystem::remove_all(entry.path());
  }
  Model model;
  checkpointing::TrainingState state({{"model", model}}, {}, {.keep = 1});
  for (int step = 1; step <= 20; ++step) {
    manual_seed(static_cast<std::uint64_t>(step));
    state.save(dir, step);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_F(ProveResume, SeesATrainingThatClearsItsFolder) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const ShellResult result =
      ckpt("prove-resume --kill-at 2 -- env CAIRN_TEST_DIR={dir} " + program +
           " --gtest_also_run_disabled_tests --gtest_filter=TrainingProgram.DISABLED_BeginsAnew");
  EXPECT_EQ(result.status, 1) << result.out;
  EXPECT_THAT(result.err, HasSubstr("got one that began anew"));
}

TEST_F(ProveResume, AKillAfterTheLastCheckpointProvesNothing) {
  const ShellResult result =
      ckpt("prove-resume --kill-at 6 -- " + program("w=$s; trap 'sleep 2' EXIT"));
  EXPECT_EQ(result.status, 1) << result.out;
  EXPECT_THAT(result.err, AllOf(HasSubstr("to save after step 6"), HasSubstr("no later")));
}

TEST_F(ProveResume, SaysWhatWentWrong) {
  EXPECT_THAT(ckpt("prove-resume -- /no/such/program").err, HasSubstr("No such file"));
  EXPECT_THAT(ckpt("prove-resume -- false {dir}").err,
              HasSubstr("the unbroken run to end with status 0, got 1"));
  EXPECT_THAT(ckpt("prove-resume --kill-at 50 -- " + program("w=$s")).err,
              HasSubstr("a checkpoint of step 50"));
}

}  // namespace
}  // namespace cairn::test
