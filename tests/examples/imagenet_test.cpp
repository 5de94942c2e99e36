// imagenet as a user runs it, on parts of photographs (make_pictures.py): it learns at half
// precision, on two ranks too, continues within an epoch bit for bit, and has torchvision's logits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/normalize.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kImagenet = CAIRN_IMAGENET_PROGRAM;

std::string example(const std::string& name) {
  return test_folder() + "/../examples/11_imagenet/" + name;
}

class Imagenet : public testing::Test {
 protected:
  /// Once for all tests.
  static const TemporaryFolder& pictures() {
    static const TemporaryFolder folder;
    static const ShellResult made =
        shell("PYTHONPATH=" + test_folder() + "/../build/readers python3 -B " +
              example("make_pictures.py") + " " + folder.string() + " --train 20 --val 4");
    EXPECT_EQ(made.status, 0) << made.err;
    return folder;
  }
  void SetUp() override {
    for (const char* package : {"PIL", "skimage", "sklearn"}) {
      if (!std::filesystem::exists(test_folder() + "/../build/readers/" + package))
        GTEST_SKIP() << "no build/readers/" << package << ": run scripts/install_dependencies";
    }
  }
  static std::string job(const std::string& arguments) {
    return kImagenet + " --data " + pictures().string() +
           " --arch resnet18 --image-size 32 --workers 1 " + arguments;
  }
  const TemporaryFolder folder_;
};

struct Told {
  int steps = 0;
  nlohmann::json end;
};

Told told_by(const std::filesystem::path& run) {
  std::ifstream file(run / "metrics.jsonl");
  Told told;
  for (std::string line; std::getline(file, line); told.steps += told.end.contains("loss"))
    told.end = nlohmann::json::parse(line);
  return told;
}

TEST_F(Imagenet, LearnsPhotographs) {
  const std::string run = (folder_ / "run").string();
  const ShellResult result =
      shell(job("--batch-size 20 --lr 0.5 --warm-up 1 --epochs 6 --label-smoothing 0.1 --color 0.2 "
                "--keep-batchnorm-fp32 --loss-scale 1024 --checkpoint-dir " +
                (folder_ / "checkpoints").string() + " --observe " + run));
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const Told told = told_by(run);
  EXPECT_EQ(told.steps, 60);
  EXPECT_GT(told.end.at("top1"), 0.25) << "a tenth is chance";
  EXPECT_GT(told.end.at("top5"), told.end.at("top1"));
  EXPECT_THAT(result.out, HasSubstr("step 60: top-1 "));
}

/// It has 40 pictures to be better at, and 400 steps.
TEST_F(Imagenet, StopsWhereItGetsNoBetter) {
  const std::string run = (folder_ / "run").string();
  const std::string stopping = job("--batch-size 20 --lr 0.5 --epochs 41 --patience 1 --observe " +
                                   run + " --checkpoint-dir " + (folder_ / "saved").string());
  const ShellResult result = shell(stopping);
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const Told told = told_by(run);
  EXPECT_LT(told.steps, 410);
  EXPECT_THAT(result.out, HasSubstr("stopped: top-1 was no better than "));
  const ShellResult again = shell(stopping);
  ASSERT_EQ(again.status, 0) << again.out << again.err;
  EXPECT_THAT(again.out, HasSubstr("stopped: top-1 was no better than "));
  EXPECT_EQ(told_by(run).end.at("top1"), told.end.at("top1"));
}

TEST_F(Imagenet, TwoRanksAccumulateAndSynchronise) {
  const std::string run = (folder_ / "run").string();
  const ShellResult result =
      shell(std::string(CAIRN_RUN_PROGRAM) + " --nproc-per-node 2 " +
            job("--batch-size 5 --accumulate 2 --sync-bn --steps 3 --observe " + run));
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_EQ(told_by(run).steps, 3);
}

TEST_F(Imagenet, ResumesWithinAnEpochBitForBit) {
  const std::string steps = job("--batch-size 20 --save-every 3 --steps 7"),
                    whole = (folder_ / "whole").string(), broken = (folder_ / "broken").string();
  ASSERT_EQ(shell(steps + " --checkpoint-dir " + whole).status, 0);
  ASSERT_EQ(shell("cp -r " + whole + " " + broken + " && rm -r " + broken + "/step-00000006 " +
                  broken + "/step-00000007")
                .status,
            0);
  const ShellResult resumed = shell(steps + " --checkpoint-dir " + broken);
  ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 3"));
  const ShellResult diff = shell(std::string(CAIRN_CKPT_PROGRAM) + " diff " + whole +
                                 "/step-00000007 " + broken + "/step-00000007");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
}

TEST_F(Imagenet, HasTorchvisionsLogits) {
  const char* python = std::getenv("CAIRN_TORCH_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "CAIRN_TORCH_PYTHON names no Python with torchvision";
  const std::string weights = (folder_ / "resnet18.pth").string(),
                    logits = (folder_ / "logits").string();
  const ShellResult saved =
      shell(std::string(python) +
            " -c 'import sys, torch, torchvision as v\n"
            "torch.save(v.models.resnet18(num_classes=10).state_dict(), sys.argv[1])' " +
            weights);
  ASSERT_EQ(saved.status, 0) << saved.err;
  const ShellResult ours = shell(job("--opt-level O0 --batch-size 20 --evaluate --pretrained " +
                                     weights + " --logits " + logits));
  ASSERT_EQ(ours.status, 0) << ours.err;
  const ShellResult same = shell(std::string(python) + " -B " + example("compare.py") + " " +
                                 pictures().string() + " " + weights + " " + logits + " --size 32");
  EXPECT_EQ(same.status, 0) << same.out << same.err;
}

TEST(Normalize, OnTheDeviceIsThatOfTheWorkers) {
  const data::Normalize rule{.mean = {0.485, 0.456, 0.406}, .deviation = {0.229, 0.224, 0.225}};
  std::vector<double> bytes;
  for (int i = 0; i < 24; ++i) bytes.push_back(10 * i);
  const std::vector<double> seen =
      support::normalize(Tensor::from(bytes, {2, 3, 2, 2}, DType::u8), rule).to_vector();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto channel = static_cast<std::int64_t>(i / 4 % 3);
    EXPECT_NEAR(seen[i], (bytes[i] / 255 - rule.mean.of(channel)) / rule.deviation.of(channel),
                1e-6);
  }
}

TEST_F(Imagenet, SaysWhatIsMissing) {
  EXPECT_EQ(shell(kImagenet).status, 2);
  EXPECT_EQ(shell(job("--arch resnet20")).status, 2);
  const ShellResult nothing = shell(kImagenet + " --data " + folder_.string());
  EXPECT_EQ(nothing.status, 1);
  EXPECT_THAT(nothing.err, AllOf(HasSubstr("expected a folder of classes"), HasSubstr("/train")));
  ASSERT_EQ(shell("cp -r " + pictures().string() + "/* " + folder_.string() + " && rm -r " +
                  folder_.string() + "/val/coffee")
                .status,
            0);
  const ShellResult other = shell(kImagenet + " --data " + folder_.string());
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.err, HasSubstr("the same classes in train and val, got 10 and 9"));
}

}  // namespace
}  // namespace cairn::test
