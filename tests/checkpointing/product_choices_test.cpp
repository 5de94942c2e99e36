// A run's choices of routes for its products are part of its state: they decide over bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/product_choices.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "support/tensors.h"

namespace cairn::checkpointing {
namespace {

using testing::HasSubstr;

class ProductChoices : public testing::Test {
 protected:
  ProductChoices() {
    unsetenv("CAIRN_PRODUCTS");  // as users run
    set_cache("first");
  }
  ~ProductChoices() override {
    setenv("CAIRN_PRODUCTS", "default", 1);
    kernels::set_product_routes("default");
  }
  void set_cache(const std::string& name) const {
    setenv("CAIRN_CACHE", (folder_ / name).c_str(), 1);
  }
  static std::vector<double> product() {
    const Tensor a = test::random_tensor({300, 700}, DType::bf16, Device{}, 1);
    const Tensor b = test::random_tensor({700, 90}, DType::bf16, Device{}, 2);
    const Tensor y = Tensor::empty({300, 90}, DType::f32, Device{});
    kernels::matmul(a, b, y);
    return y.to_vector<double>();
  }

  TemporaryFolder folder_;
  SmallState part_;
};

TEST_F(ProductChoices, AreResumed) {
  std::set<std::vector<double>> different;
  for (const std::string setting : {"bf16", "bf16_packed", "f32_packed", "default"}) {
    kernels::set_product_routes(setting);
    const auto bits = product();
    different.insert(bits);
    const std::string path = TrainingState({{"part", part_}}).save(folder_ / setting, 1);
    kernels::set_product_routes(setting == "f32_packed" ? "bf16" : "f32_packed");
    TrainingState({{"part", part_}}).resume(path);
    EXPECT_THAT(kernels::product_choices(), HasSubstr("\"" + setting + "\"")) << setting;
    EXPECT_EQ(product(), bits) << setting;
  }
  EXPECT_GT(different.size(), 1u);  // a setting that is set is used
}

TEST_F(ProductChoices, TimedOnesAreResumed) {
  kernels::set_product_routes("time");
  const auto bits = product();
  const std::string chosen = kernels::product_choices();
  EXPECT_THAT(chosen, HasSubstr("matmul bf16 to f32 nn 1x256x512x64"));
  const std::string path = TrainingState({{"part", part_}}).save(folder_.string(), 1);
  kernels::set_product_routes("default");
  EXPECT_NE(kernels::product_choices(), chosen);
  TrainingState({{"part", part_}}).resume(path);
  EXPECT_EQ(kernels::product_choices(), chosen);
  EXPECT_EQ(product(), bits);
}

// What CAIRN_PRODUCTS says stands, with a word.
TEST_F(ProductChoices, TheEnvironmentStandsBefore) {
  kernels::set_product_routes("f32_packed");
  const std::string path = TrainingState({{"part", part_}}).save(folder_.string(), 1);
  setenv("CAIRN_PRODUCTS", "bf16", 1);
  kernels::set_product_routes("bf16");
  testing::internal::CaptureStderr();
  TrainingState({{"part", part_}}).resume(path);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::AllOf(HasSubstr("CAIRN_PRODUCTS=bf16"), HasSubstr("f32_packed")));
  EXPECT_THAT(kernels::product_choices(), HasSubstr("\"bf16\""));
}

// Of a file of choices those of the same works stand, and one that differs is told.
TEST_F(ProductChoices, AFileOfThemStandsBeforeWithAWordWhereOneDiffers) {
  kernels::set_product_routes("time");
  (void)product();
  const std::string path = TrainingState({{"part", part_}}).save(folder_.string(), 1);
  const std::string chosen = kernels::product_choices(), file = folder_ / "mine.json";
  const auto told_where = [&](const std::string& choices) {
    std::ofstream(file) << choices;
    setenv("CAIRN_PRODUCTS", file.c_str(), 1);
    testing::internal::CaptureStderr();
    TrainingState({{"part", part_}}).resume(path);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told_where(chosen), "");
  const std::size_t way = chosen.rfind("\":\"") + 3;  // of the last work
  EXPECT_THAT(told_where(chosen.substr(0, way) + "other" + chosen.substr(chosen.find('"', way))),
              HasSubstr("stands before the saved choices"));
}

TEST_F(ProductChoices, AFailedResumeLeavesThemAlone) {
  kernels::set_product_routes("f32_packed");
  const std::string path = TrainingState({{"part", part_}}).save(folder_.string(), 1);
  kernels::set_product_routes("bf16");
  SmallState other;
  EXPECT_THROW(TrainingState({{"another", other}}).resume(path), core::DataError);
  EXPECT_THAT(kernels::product_choices(), HasSubstr("\"bf16\""));
}

}  // namespace
}  // namespace cairn::checkpointing
