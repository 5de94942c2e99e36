// A run's choices of routes for its products are part of its state: they decide over bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

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
    const Tensor y = Tensor::empty({300, 90}, DType::bf16, Device{});
    kernels::matmul(a, b, y);
    return y.to_vector<double>();
  }

  TemporaryFolder folder_;
  SmallState part_;
};

TEST_F(ProductChoices, AreResumed) {
  for (const std::string setting : {"bf16", "bf16_packed", "f32_packed", "default"}) {
    kernels::set_product_routes(setting);
    const auto bits = product();
    const std::string path = TrainingState({{"part", part_}}).save(folder_ / setting, 1);
    kernels::set_product_routes(setting == "f32_packed" ? "bf16" : "f32_packed");
    TrainingState({{"part", part_}}).resume(path);
    EXPECT_THAT(kernels::product_choices(), HasSubstr("\"" + setting + "\"")) << setting;
    EXPECT_EQ(product(), bits) << setting;
  }
}

TEST_F(ProductChoices, TimedOnesAreResumed) {
  kernels::set_product_routes("time");
  const auto bits = product();
  const std::string chosen = kernels::product_choices();
  EXPECT_THAT(chosen, HasSubstr("matmul bf16 to bf16 nn 1x256x512x64"));
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
