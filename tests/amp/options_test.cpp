#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "cairn/amp/amp.h"
#include "cairn/core/error.h"
#include "support/message_of.h"

namespace cairn::amp {
namespace {

using testing::HasSubstr;

std::string error_of(const Options& options) {
  return test::message_of([&] { resolve(options); });
}

TEST(OptLevel, ParsesAndExplains) {
  EXPECT_EQ(parse_opt_level("O0"), OptLevel::O0);
  EXPECT_EQ(parse_opt_level("O3"), OptLevel::O3);
  for (const char* text : {"02", "o2", "O4", "", "2", "O22"}) {
    EXPECT_THAT(test::message_of([&] { parse_opt_level(text); }), HasSubstr("letter O")) << text;
  }
}

struct Defaults {
  OptLevel level;
  DType half;
  std::optional<bool> keep_batchnorm, masters;
  bool dynamic;
};

TEST(Options, DefaultsOfEveryLevel) {
  const std::optional<bool> unset;
  const Defaults table[] = {
      {OptLevel::O0, DType::f16, unset, unset, false},
      {OptLevel::O1, DType::f16, unset, unset, true},
      {OptLevel::O2, DType::f16, true, true, true},
      {OptLevel::O3, DType::f16, false, false, false},
      {OptLevel::O0, DType::bf16, unset, unset, false},
      {OptLevel::O1, DType::bf16, unset, unset, false},
      {OptLevel::O2, DType::bf16, true, true, false},
      {OptLevel::O3, DType::bf16, false, false, false},
  };
  for (const Defaults& row : table) {
    const Options resolved = resolve({.opt_level = row.level, .half_dtype = row.half});
    SCOPED_TRACE(describe(resolved));
    EXPECT_EQ(resolved.keep_batchnorm_fp32, row.keep_batchnorm);
    EXPECT_EQ(resolved.master_weights, row.masters);
    EXPECT_EQ(resolved.dynamic_loss_scale, row.dynamic);
    EXPECT_EQ(resolved.scaler.dynamic, row.dynamic);
    EXPECT_EQ(resolved.loss_scale, row.dynamic ? std::nullopt : std::optional(1.0));
  }
}

TEST(Options, Overrides) {
  Options o3{.opt_level = OptLevel::O3, .keep_batchnorm_fp32 = true, .dynamic_loss_scale = true};
  EXPECT_TRUE(*resolve(o3).keep_batchnorm_fp32);
  EXPECT_TRUE(resolve(o3).scaler.dynamic);
  const Options o2 =
      resolve({.opt_level = OptLevel::O2, .master_weights = false, .loss_scale = 128});
  EXPECT_FALSE(*o2.master_weights);
  EXPECT_FALSE(o2.scaler.dynamic);
  EXPECT_EQ(LossScaler(o2.scaler).scale(), 128.0);
  const Options fixed = resolve({.scaler = {.dynamic = false, .init_scale = 32}});
  EXPECT_EQ(fixed.loss_scale, 32.0);
}

TEST(Options, ResolvingTwiceChangesNothing) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    const Options once = resolve({.opt_level = level});
    EXPECT_EQ(describe(resolve(once)), describe(once));
  }
}

struct Refused {
  Options options;
  std::vector<std::string> named;
};

TEST(Options, ContradictionsAndImpossibleValuesAreNamed) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<Refused> all = {
      {{.opt_level = OptLevel::O1, .keep_batchnorm_fp32 = true},
       {"keep_batchnorm_fp32 = true", "O1"}},
      {{.opt_level = OptLevel::O1, .cast_model_type = DType::f16}, {"cast_model_type", "O1"}},
      {{.opt_level = OptLevel::O2, .cast_model_type = DType::bf16},
       {"cast_model_type = bf16", "half_dtype = f16"}},
      {{.opt_level = OptLevel::O2, .autocast = true}, {"autocast = true", "O2"}},
      {{.opt_level = OptLevel::O1, .master_weights = true}, {"master_weights = true", "O1"}},
      {{.loss_scale = 128, .dynamic_loss_scale = true},
       {"loss_scale = 128", "dynamic_loss_scale = true"}},
      {{.dynamic_loss_scale = true, .scaler = {.dynamic = false}},
       {"dynamic_loss_scale = true", "scaler.dynamic = false"}},
      {{.half_dtype = DType::f32}, {"got f32"}},
      {{.loss_scale = 0}, {"loss_scale > 0"}},
      {{.loss_scale = inf}, {"finite"}},
      {{.max_gradient_norm = -1}, {"max_gradient_norm >= 0"}},
      {{.num_losses = 0}, {"num_losses >= 1"}},
      {{.cast_model_outputs = DType::i64}, {"floating"}},
      {{.collapse_after = -1}, {"collapse_after"}}};
  for (const Refused& refused : all) {
    for (const std::string& name : refused.named) {
      EXPECT_THAT(error_of(refused.options), HasSubstr(name));
    }
  }
}

TEST(Options, DescribeTellsAll) {
  EXPECT_EQ(
      describe(resolve({.opt_level = OptLevel::O2, .num_losses = 3, .max_gradient_norm = 1.5})),
      "opt level O2: model f16, batch norm f32, f32 masters, 3 losses, dynamic loss scale from "
      "65536 (times 0.5 on overflow, 2 after 2000 steps, within 1 and 16777216), clipped at norm "
      "1.5");
  EXPECT_EQ(describe(resolve({.opt_level = OptLevel::O1, .half_dtype = DType::bf16})),
            "opt level O1: model f32, autocast bf16, loss scale 1");
  EXPECT_EQ(describe(resolve({.opt_level = OptLevel::O3})),
            "opt level O3: model f16, batch norm f16, no masters, loss scale 1");
  EXPECT_EQ(describe(resolve({.loss_scale = 8,
                              .cast_policies = {{"softmax", autograd::CastPolicy::half},
                                                {"gelu", autograd::CastPolicy::f32}}})),
            "opt level O1: model f32, autocast f16 but for softmax (half), gelu (f32), "
            "loss scale 8");
  EXPECT_EQ(describe(resolve({.enabled = false, .max_gradient_norm = 2})),
            "disabled: the model as it is, loss scale 1, clipped at norm 2");
}

}  // namespace
}  // namespace cairn::amp
