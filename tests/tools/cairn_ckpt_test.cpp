// cairn-ckpt, run as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "shell.h"

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
  EXPECT_THAT(result.out, AllOf(HasSubstr("inspect"), HasSubstr("verify"), HasSubstr("diff")));
}

TEST_F(CairnCkpt, WrongUsageIsOneLineAndStatus2) {
  for (const std::string arguments :
       {"", "inspect", "inspect /no/such/path", "verify --fast /tmp", "diff /tmp", "repair /tmp"}) {
    const ShellResult result = ckpt(arguments);
    EXPECT_EQ(result.status, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
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

}  // namespace
}  // namespace cairn::test
