#include "cairn/optim/arena.h"

#include <gmock/gmock.h>

#include <cstdint>

#include "support.h"

namespace cairn::optim {
namespace {

using testing::ElementsAre;

NamedTensors three() {
  return {make_parameter("first", {3, 5}, 1), make_parameter("second", {7}, 2),
          make_parameter("third", {}, 3)};
}

/// These alone, registered in their order, which is the reverse of that in the one buffer.
void expect_order(const GradientArena& arena, const NamedTensors& parameters) {
  ASSERT_EQ(arena.buffers().size(), 1u);
  const auto& slots = arena.buffers().front().slots;
  ASSERT_EQ(slots.size(), parameters.size());
  ASSERT_EQ(arena.parameters().size(), parameters.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_TRUE(arena.parameters()[i].tensor.same(parameters[i].tensor));
    EXPECT_EQ(slots[i].parameter, slots.size() - 1 - i);
    EXPECT_EQ(slots[i].offset, static_cast<std::int64_t>(16 * i));
  }
}

TEST(GradientArena, LaysOutInReverseOrderAligned) {
  const NamedTensors parameters = three();
  const auto arena = GradientArena::attach(parameters);
  expect_order(*arena, parameters);
  const GradientArena::Buffer& buffer = arena->buffers().front();
  EXPECT_EQ(buffer.data.numel(), 48);
  EXPECT_EQ(buffer.data.storage()->category(), core::MemoryCategory::gradients);
  for (const auto& slot : buffer.slots) {
    const Tensor& memory = parameters[slot.parameter].tensor.gradient_slot().memory();
    EXPECT_EQ(memory.raw_data(), buffer.data.data<float>() + slot.offset);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.raw_data()) % 64, 0u);
    EXPECT_EQ(memory.shape(), parameters[slot.parameter].tensor.shape());
    EXPECT_FALSE(parameters[slot.parameter].tensor.grad().defined());
  }
}

TEST(GradientArena, OneBufferPerDtypeAndF32SlotsOnRequest) {
  const auto make = [] {
    return NamedTensors{make_parameter("a", {4}, 1, DType::f16), make_parameter("b", {4}, 2),
                        make_parameter("c", {4}, 3, DType::bf16)};
  };
  const NamedTensors parameters = make(), others = make();
  const auto arena = GradientArena::attach(parameters);
  ASSERT_EQ(arena->buffers().size(), 3u);
  EXPECT_EQ(arena->buffers()[0].data.dtype(), DType::bf16);
  EXPECT_EQ(arena->buffers()[2].data.dtype(), DType::f16);
  EXPECT_EQ(parameters[0].tensor.gradient_slot().memory().dtype(), DType::f16);

  const auto wide = GradientArena::attach(others, true);
  ASSERT_EQ(wide->buffers().size(), 1u);
  EXPECT_EQ(wide->buffers()[0].data.dtype(), DType::f32);
  EXPECT_EQ(GradientArena::attach(parameters, true), arena);  // the former one turns to f32
  ASSERT_EQ(arena->buffers().size(), 1u);
  EXPECT_EQ(arena->buffers()[0].data.dtype(), DType::f32);
}

TEST(GradientArena, IsSharedByThoseWhoAttach) {
  const NamedTensors parameters = three();
  const auto arena = GradientArena::attach(parameters);
  EXPECT_EQ(GradientArena::attach(parameters), arena);
  EXPECT_EQ(GradientArena::attach({parameters[1]}), arena);
  EXPECT_EQ(GradientArena::of(parameters[2].tensor), arena);
  EXPECT_EQ(arena->generation(), 1u);
}

TEST(GradientArena, WithoutBuffersWidensTheRestWhereMemoryIsThereAgain) {
  const NamedTensors parameters = {make_parameter("a", {1000}, 1, DType::f16),
                                   make_parameter("b", {1000}, 2, DType::f16)};
  const auto without_buffers = std::make_shared<const char>();
  const auto arena = GradientArena::attach(parameters, false, without_buffers);
  write_gradients(parameters, 3);
  const std::vector<Values> gradients = gradients_of(parameters);
  const Device device = core::default_device();
  core::set_memory_capacity(device, core::memory_stats(device).current_total + 4096);
  EXPECT_THROW(arena->use_f32_slots(), core::OutOfMemory);
  core::set_memory_capacity(device, SIZE_MAX);
  EXPECT_EQ(GradientArena::attach(parameters), arena);
  for (const auto& [name, tensor] : parameters)
    EXPECT_EQ(tensor.grad().dtype(), DType::f32) << name;
  EXPECT_EQ(gradients_of(parameters), gradients);
}

TEST(GradientArena, FrozenParametersBelongToItWithoutASlot) {
  NamedTensors parameters = three();
  parameters[1].tensor.set_requires_grad(false);
  const auto arena = GradientArena::attach(parameters);
  EXPECT_EQ(arena->buffers()[0].slots.size(), 2u);
  EXPECT_EQ(GradientArena::of(parameters[1].tensor), arena);
  EXPECT_FALSE(parameters[1].tensor.gradient_slot().placed());
  parameters[1].tensor.set_requires_grad(true);
  arena->begin(1);
  EXPECT_EQ(arena->buffers()[0].slots.size(), 3u);
}

TEST(GradientArena, TakesInWhatOthersHaveInTheOrderOfRegistration) {
  NamedTensors parameters = three();
  const auto last = GradientArena::attach({parameters[2]});
  const auto first = GradientArena::attach({parameters[0]});
  EXPECT_NE(first, last);
  write_gradients(parameters, 20);
  const std::vector<Values> before = gradients_of(parameters);
  const auto arena = GradientArena::attach(parameters);
  EXPECT_EQ(arena, first);
  EXPECT_TRUE(last->parameters().empty());
  expect_order(*arena, parameters);
  for (const auto& [name, tensor] : parameters) {
    EXPECT_EQ(tensor.grad().storage(), arena->buffers()[0].data.storage());
    EXPECT_EQ(GradientArena::of(tensor), arena);
  }
  EXPECT_EQ(gradients_of(parameters), before);
}

TEST(GradientArena, IsInTheOrderOfRegistrationWhoeverAttachedFirst) {
  const NamedTensors parameters = three();
  const auto arena = GradientArena::attach({parameters[1]});
  EXPECT_EQ(GradientArena::attach(parameters), arena);
  expect_order(*arena, parameters);
}

TEST(GradientArena, TakesInF32SlotsAndLetsGoOfFrozenOnes) {
  const NamedTensors parameters = {make_parameter("a", {4}, 1, DType::bf16),
                                   make_parameter("b", {4}, 2, DType::bf16),
                                   make_parameter("c", {4}, 3, DType::bf16)};
  const auto half = GradientArena::attach({parameters[0]});
  const auto wide = GradientArena::attach({parameters[1], parameters[2]}, true);
  Tensor(parameters[2].tensor).set_requires_grad(false);
  EXPECT_EQ(GradientArena::attach(parameters), half);
  EXPECT_TRUE(half->f32_slots());
  EXPECT_EQ(parameters[0].tensor.gradient_slot().memory().dtype(), DType::f32);
  EXPECT_FALSE(parameters[2].tensor.gradient_slot().placed());
  EXPECT_FALSE(parameters[2].tensor.gradient_slot().memory().defined());
}

TEST(GradientArena, AddsInF32UnlessToldOtherwise) {
  for (const bool in_f32 : {true, false}) {
    const NamedTensors parameters = {make_parameter("a", {4}, 1, DType::bf16)};
    const auto arena = GradientArena::attach(parameters);
    arena->accumulate_in_f32(in_f32);
    arena->begin(1);
    write_gradients(parameters, 20);
    arena->begin(2);  // it adds
    EXPECT_EQ(parameters[0].tensor.gradient_slot().memory().dtype(),
              in_f32 ? DType::f32 : DType::bf16);
  }
}

TEST(GradientArena, RejectsAParameterGivenTwiceOrWithGaps) {
  const NamedTensor once = make_parameter("once", {3}, 1);
  EXPECT_THROW(GradientArena::attach({once, once}), core::InvalidArgument);
  const Tensor whole = Tensor::zeros({4, 4});
  Tensor column = whole.alias(whole.view().slice(1, 0, 2));
  column.set_requires_grad(true);
  EXPECT_THROW(GradientArena::attach({{"column", column}}), core::InvalidArgument);
}

TEST(GradientArena, ClearLeavesTheMemoryAndForgetsTheGradients) {
  const NamedTensors parameters = three();
  const auto arena = GradientArena::attach(parameters);
  write_gradients(parameters, 20);
  const Values before = values(arena->buffers()[0].data);
  EXPECT_TRUE(parameters[0].tensor.grad().defined());
  arena->clear();
  EXPECT_FALSE(parameters[0].tensor.grad().defined());
  EXPECT_EQ(values(arena->buffers()[0].data), before);
}

TEST(GradientArena, SlotsFollowTheParametersLayout) {
  Tensor weight = Tensor::empty_strided({2, 3, 4, 5}, core::channels_last_strides({2, 3, 4, 5}),
                                        DType::f32, {});
  kernels::fill(weight, 1.0);
  weight.set_requires_grad(true);
  const auto arena = GradientArena::attach({{"weight", weight}});
  EXPECT_EQ(weight.gradient_slot().memory().strides(), weight.strides());
  write_gradient(weight, test::random_values(120, 4));
  EXPECT_EQ(values(weight.grad()).size(), 120u);
}

TEST(GradientArena, RefreshFollowsCastsAndKeepsOtherGradients) {
  NamedTensors parameters = three();
  const auto arena = GradientArena::attach(parameters);
  write_gradients(parameters, 40);
  const Values kept = values(parameters[1].tensor.grad());
  parameters[0].tensor.set_data(Tensor::zeros({3, 5}, DType::f16));
  EXPECT_TRUE(arena->stale());
  EXPECT_EQ(GradientArena::attach(parameters), arena);  // refreshes
  EXPECT_FALSE(arena->stale());
  EXPECT_EQ(arena->generation(), 2u);
  EXPECT_EQ(arena->buffers().size(), 2u);
  EXPECT_FALSE(parameters[0].tensor.grad().defined());
  EXPECT_EQ(parameters[0].tensor.gradient_slot().memory().dtype(), DType::f16);
  EXPECT_EQ(values(parameters[1].tensor.grad()), kept);
}

TEST(GradientArena, AnEndedArenaLeavesGradientsBehind) {
  const NamedTensors parameters = three();
  auto arena = GradientArena::attach(parameters);
  write_gradient(parameters[1].tensor, {1, 2, 3, 4, 5, 6, 7});
  arena.reset();
  EXPECT_THAT(values(parameters[1].tensor.grad()), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_FALSE(parameters[1].tensor.gradient_slot().placed());
  EXPECT_FALSE(parameters[0].tensor.gradient_slot().memory().defined());
  EXPECT_TRUE(GradientArena::attach(parameters));
  EXPECT_THAT(values(parameters[1].tensor.grad()), ElementsAre(1, 2, 3, 4, 5, 6, 7));
}

TEST(GradientArena, EmptyParametersAndNoParameters) {
  const NamedTensors parameters = {make_parameter("empty", {0, 4}, 1), make_parameter("b", {2}, 2)};
  const auto arena = GradientArena::attach(parameters);
  EXPECT_EQ(arena->buffers()[0].slots.size(), 2u);
  EXPECT_TRUE(GradientArena::attach({})->buffers().empty());
}

TEST(WrapParameter, UsesForeignMemoryForBoth) {
  std::vector<float> weight{1, 2, 3}, gradient{4, 5, 6};
  const NamedTensor parameter = wrap_parameter("w", TensorView(weight.data(), {3}, DType::f32),
                                               TensorView(gradient.data(), {3}, DType::f32));
  EXPECT_EQ(parameter.tensor.raw_data(), weight.data());
  EXPECT_EQ(parameter.tensor.grad().raw_data(), gradient.data());
  EXPECT_TRUE(GradientArena::attach({parameter})->parameters().empty());
  EXPECT_EQ(parameter.tensor.grad().raw_data(), gradient.data());
  EXPECT_THROW(wrap_parameter("w", TensorView(weight.data(), {3}, DType::f32),
                              TensorView(gradient.data(), {2}, DType::f32)),
               core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::optim
