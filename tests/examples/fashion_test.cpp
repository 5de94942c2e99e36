// fashion as a user runs it, on drawn digits in Fashion-MNIST's format: it learns with LARC
// and LAMB, the same on several ranks, and continues bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cairn/data/drawn_digits.h"
#include "tools/shell.h"

namespace cairn::test {
namespace {

using testing::HasSubstr;

const std::string kFashion = CAIRN_FASHION_PROGRAM;
const std::string kFashionRun = CAIRN_RUN_PROGRAM;
const std::string kFashionCkpt = CAIRN_CKPT_PROGRAM;

void write_idx(const std::filesystem::path& path, const Tensor& bytes) {
  std::ofstream file(path, std::ios::binary);
  const auto write_number = [&](std::int64_t number) {
    for (const int shift : {24, 16, 8, 0}) file.put(static_cast<char>(number >> shift));
  };
  write_number(0x0800 + bytes.dims());
  for (const std::int64_t size : bytes.shape()) write_number(size);
  file.write(static_cast<const char*>(bytes.raw_data()),
             static_cast<std::streamsize>(bytes.nbytes()));
}

void write_set(const std::filesystem::path& folder, const std::string& name, std::uint64_t seed,
               std::int64_t count) {
  const data::DrawnDigits digits(seed, count);
  std::vector<std::uint8_t> labels;
  for (const std::int64_t label : digits.labels().to_vector<std::int64_t>())
    labels.push_back(static_cast<std::uint8_t>(label));
  write_idx(folder / (name + "-images-idx3-ubyte"), digits.images());
  write_idx(folder / (name + "-labels-idx1-ubyte"), Tensor::from(labels, {count}));
}

class Fashion : public testing::Test {
 protected:
  void SetUp() override {
    write_set(folder_.string(), "train", 1, 1500);
    write_set(folder_.string(), "t10k", 2, 500);
  }
  /// What a run told: a line for each step, the last one is its end.
  std::vector<nlohmann::json> told(const std::string& arguments, const std::string& launcher = "") {
    const auto run = (folder_ / core::str("run", runs_++)).string();
    const ShellResult result =
        shell(launcher + kFashion + data() + " --observe " + run + " " + arguments);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    std::istringstream file(read_text(run + "/metrics.jsonl"));
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    EXPECT_FALSE(lines.empty());
    return lines;
  }
  std::string data() const { return " --data " + folder_.string(); }

  const TemporaryFolder folder_;
  int runs_ = 0;
};

TEST_F(Fashion, LearnsWithLayerwiseRates) {
  for (const char* optimizer : {"larc --lr 0.5", "lamb --lr 0.03"}) {
    const auto lines =
        told(std::string("--batch-size 20 --steps 20 --test-size 100 --optimizer ") + optimizer);
    EXPECT_LT(lines.at(19).at("loss"), 0.8 * lines.at(0).at("loss").get<double>()) << optimizer;
  }
}

// Batch norms see all ranks' images, and so do their averages: two ranks of 20 train as one of 40.
TEST_F(Fashion, RanksTrainAsOneProcess) {
  const std::string flags = "--opt-level O0 --lr 0.02 --steps 8 --train-size 400 --batch-size ";
  const auto one = told(flags + "40"),
             two = told(flags + "20", kFashionRun + " --nproc-per-node 2 ");
  ASSERT_EQ(one.size(), two.size());
  for (std::size_t step = 0; step < 8; ++step) {
    const double norm = one[step].at("gradient_norm");
    EXPECT_NEAR(two[step].at("gradient_norm"), norm, 0.01 * norm) << step;
  }
  for (const char* number : {"test_accuracy", "of_last_weights"})
    EXPECT_NEAR(one.back().at(number), two.back().at(number), 0.011) << number;
}

TEST_F(Fashion, ResumesBitForBit) {
  const std::string job = kFashion + data() + " --train-size 400 --save-every 5 --steps 10";
  const std::string whole = (folder_ / "whole").string(), broken = (folder_ / "broken").string();
  ASSERT_EQ(shell(job + " --checkpoint-dir " + whole).status, 0);
  ASSERT_EQ(
      shell("cp -r " + whole + " " + broken + " && rm -r " + broken + "/step-00000010").status, 0);
  const ShellResult resumed = shell(job + " --checkpoint-dir " + broken);
  ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 5"));
  const ShellResult diff =
      shell(kFashionCkpt + " diff " + whole + "/step-00000010 " + broken + "/step-00000010");
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
}

TEST_F(Fashion, SaysWhichPackageHasItsImages) {
  const ShellResult result = shell(kFashion + " --data /nowhere");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              testing::AllOf(HasSubstr("/nowhere"), HasSubstr("dataset-fashion-mnist")));
  EXPECT_EQ(shell(kFashion + data() + " --train-size 0").status, 2);
  EXPECT_EQ(shell(kFashion + data() + " --optimizer sdg").status, 2);
}

}  // namespace
}  // namespace cairn::test
