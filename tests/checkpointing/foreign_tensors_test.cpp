// Tensors of another library: one that has ggml's calls.
#include "cairn/checkpointing/foreign_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <optional>

#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "checkpointing/temporary_folder.h"
#include "support/expect_error.h"

namespace cairn::checkpointing {
namespace {

using test::expect_error;

// ---- As ggml has it: sizes from the innermost on, memory of a backend that calls alone reach.

enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_I32, GGML_TYPE_Q8_0 };

struct ggml_tensor {
  ggml_type type;
  std::int64_t ne[4];
  char name[64];
  std::string backend;  // bytes
  ggml_tensor* next = nullptr;
};

int sets = 0;  // calls of ggml_backend_tensor_set

void ggml_backend_tensor_get(const ggml_tensor* t, void* data, std::size_t at, std::size_t n) {
  ASSERT_LE(at + n, t->backend.size());
  std::memcpy(data, t->backend.data() + at, n);
}
void ggml_backend_tensor_set(ggml_tensor* t, const void* data, std::size_t at, std::size_t n) {
  ASSERT_LE(at + n, t->backend.size());
  ++sets;
  std::memcpy(t->backend.data() + at, data, n);
}

struct ggml_context {
  std::deque<ggml_tensor> tensors;

  ggml_tensor* add(const char* name, ggml_type type, std::int64_t n0, std::int64_t n1 = 1) {
    ggml_tensor& t = tensors.emplace_back(ggml_tensor{type, {n0, n1, 1, 1}, {}, {}});
    std::strncpy(t.name, name, sizeof t.name - 1);
    const std::int64_t n = n0 * n1;
    const std::int64_t bytes = type == GGML_TYPE_Q8_0  ? n / 32 * 34
                               : type == GGML_TYPE_F16 ? 2 * n
                                                       : 4 * n;
    t.backend.resize(static_cast<std::size_t>(bytes));
    if (tensors.size() > 1) tensors[tensors.size() - 2].next = &t;
    return &t;
  }
};
ggml_tensor* ggml_get_first_tensor(ggml_context* ctx) {
  return &ctx->tensors.front();
}
ggml_tensor* ggml_get_next_tensor(ggml_context*, ggml_tensor* t) {
  return t->next;
}

// ---- A trainer that has it

std::vector<ForeignTensor> tensors_of(ggml_context* ctx) {
  std::vector<ForeignTensor> tensors;
  for (ggml_tensor* t = ggml_get_first_tensor(ctx); t != nullptr;
       t = ggml_get_next_tensor(ctx, t)) {
    const DType dtype = t->type == GGML_TYPE_F32   ? DType::f32
                        : t->type == GGML_TYPE_F16 ? DType::f16
                        : t->type == GGML_TYPE_I32 ? DType::i32
                                                   : DType::u8;
    Shape shape = {t->ne[1], t->ne[0]};
    if (dtype == DType::u8) shape = {static_cast<std::int64_t>(t->backend.size())};
    tensors.push_back(
        {t->name, dtype, shape,
         [t](void* to, std::size_t at, std::size_t n) { ggml_backend_tensor_get(t, to, at, n); },
         [t](const void* from, std::size_t at, std::size_t n) {
           ggml_backend_tensor_set(t, from, at, n);
         }});
  }
  return tensors;
}

std::vector<float> floats_of(const ggml_tensor* t) {
  std::vector<float> values(t->backend.size() / 4);
  ggml_backend_tensor_get(t, values.data(), 0, t->backend.size());
  return values;
}

/// Learns y = 2 x by momentum, beside a base that is quantised.
struct Finetune {
  ggml_context ctx;
  ggml_tensor* base = ctx.add("blk.0.base.weight", GGML_TYPE_Q8_0, 64, 2);
  ggml_tensor* lora = ctx.add("blk.0.lora.weight", GGML_TYPE_F32, 3, 2);
  ggml_tensor* momentum = ctx.add("blk.0.lora.momentum", GGML_TYPE_F32, 3, 2);
  ggml_tensor* seen = ctx.add("seen", GGML_TYPE_I32, 1);
  ForeignTensors model{tensors_of(&ctx)};
  std::int64_t rows = 0;
  Variables variables{{"rows", rows}};
  TrainingState state{{{"model", model}, {"mine", variables}}};

  Finetune() {
    for (std::size_t i = 0; i < base->backend.size(); ++i)
      base->backend[i] = static_cast<char>(i * 37);
  }
  void step() {
    auto w = floats_of(lora), m = floats_of(momentum);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const float x = std::sin(static_cast<float>(rows + static_cast<std::int64_t>(i)));
      m[i] = 0.9f * m[i] + (w[i] - 2.0f) * x * x;
      w[i] -= 0.1f * m[i];
    }
    ++rows;
    ggml_backend_tensor_set(lora, w.data(), 0, lora->backend.size());
    ggml_backend_tensor_set(momentum, m.data(), 0, momentum->backend.size());
  }
};

TEST(ForeignTensors, AFinetuneGoesOnWithItsBits) {
  const TemporaryFolder dir;
  Finetune whole;
  for (int step = 0; step < 9; ++step) whole.step();
  {
    Finetune first;
    first.state.resume_latest(dir.string());
    for (int step = 0; step < 5; ++step) {
      first.step();
      first.state.save_every(2, dir.string());
    }
  }
  Finetune second;
  second.base->backend.assign(second.base->backend.size(), '\0');
  ASSERT_TRUE(second.state.resume_latest(dir.string()));
  EXPECT_EQ(second.rows, 4);
  while (second.rows < 9) second.step();
  for (std::size_t i = 0; i < whole.ctx.tensors.size(); ++i)
    EXPECT_EQ(second.ctx.tensors[i].backend, whole.ctx.tensors[i].backend) << i;
}

TEST(ForeignTensors, AreStoredWithTheirTypesAndSizes) {
  const StateDict state = Finetune().model.state_dict();
  const auto& block = state.dict("blk").dict("0");
  EXPECT_EQ(block.dict("base").tensor("weight").dtype(), DType::u8);
  EXPECT_EQ(block.dict("base").tensor("weight").shape(), (Shape{136}));
  EXPECT_EQ(block.dict("lora").tensor("weight").shape(), (Shape{2, 3}));
  EXPECT_EQ(state.tensor("seen").dtype(), DType::i32);
}

TEST(ForeignTensors, FloatsAreConverted) {
  ggml_context halves, floats;
  ggml_tensor* h = halves.add("w", GGML_TYPE_F16, 2);
  ggml_tensor* f = floats.add("w", GGML_TYPE_F32, 2);
  const float values[] = {1.0f + 1.0f / 4096.0f, -65536.0f};
  ggml_backend_tensor_set(f, values, 0, sizeof values);
  ForeignTensors(tensors_of(&halves))
      .load_state_dict(ForeignTensors(tensors_of(&floats)).state_dict());
  std::uint16_t bits[2];
  ggml_backend_tensor_get(h, bits, 0, sizeof bits);
  EXPECT_EQ(bits[0], 0x3c00);  // 1
  EXPECT_EQ(bits[1], 0xfc00);  // -inf
}

TEST(ForeignTensors, WhatDoesNotFitIsNamedAndNothingWritten) {
  Finetune one;
  StateDict state = one.model.state_dict();
  ggml_context other;
  other.add("blk.0.base.weight", GGML_TYPE_Q8_0, 64, 2);
  other.add("blk.0.lora.weight", GGML_TYPE_F32, 2, 3);
  other.add("blk.1.lora.weight", GGML_TYPE_F32, 3, 2);
  other.add("seen", GGML_TYPE_I32, 1);
  const int before = sets;
  expect_error<core::DataError>(
      [&] { ForeignTensors(tensors_of(&other)).load_state_dict(state); },
      {"missing: 'blk.1.lora.weight'", "'blk.0.lora.weight': expected f32 [3, 2], got f32 [2, 3]",
       "surplus: 'blk.0.lora.momentum'"});
  EXPECT_EQ(sets, before);
}

TEST(ForeignTensors, ACallbackThatThrowsLeavesTheCheckpointsBefore) {
  const TemporaryFolder dir;
  Finetune one;
  one.state.save(dir.string(), 1);
  std::vector<ForeignTensor> tensors = tensors_of(&one.ctx);
  tensors[1].read = [](void*, std::size_t, std::size_t) {
    throw std::runtime_error("the device is lost");
  };
  ForeignTensors broken(tensors);
  TrainingState state({{"model", broken}, {"mine", one.variables}});
  expect_error<std::runtime_error>([&] { state.save(dir.string(), 2); }, {"the device is lost"});
  Finetune again;
  EXPECT_TRUE(again.state.resume_latest(dir.string()));
  EXPECT_EQ(again.state.step(), 1);
}

TEST(ForeignTensors, RefuseNamesAndCallbacksThatCannotBe) {
  ggml_context twice;
  twice.add("w", GGML_TYPE_F32, 1);
  twice.add("w", GGML_TYPE_F32, 1);
  expect_error<core::InvalidArgument>([&] { ForeignTensors{tensors_of(&twice)}; }, {"'w'"});
  expect_error<core::InvalidArgument>([] { ForeignTensors({{.name = "w", .shape = {1}}}); },
                                      {"callbacks that read and write 'w'"});
}

}  // namespace
}  // namespace cairn::checkpointing
