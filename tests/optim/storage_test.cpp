// State in less memory: bf16 moments, masters as bf16 weight and remainder. Files do not change.
#include <gmock/gmock.h>

#include "reference.h"
#include "support.h"

namespace cairn::optim {
namespace {

using testing::HasSubstr;

const StateOptions kSmall{.moments = DType::bf16, .masters = MasterStorage::remainder};

NamedTensors bf16_parameters(Device device = core::default_device()) {
  return {make_parameter("layer.weight", {37, 11}, 1, DType::bf16, device),
          make_parameter("layer.bias", {7}, 2, DType::bf16, device),
          make_parameter("norm.weight", {5}, 3, DType::f32, device)};
}

class StorageOnDevice : public testing::TestWithParam<Device> {};

/// The truth of a weight does not depend on how it is kept.
TEST_P(StorageOnDevice, RemaindersTrainAsMastersDoBitForBit) {
  for (const Rule& rule : rules()) {
    SCOPED_TRACE(rule.name);
    const NamedTensors a = bf16_parameters(GetParam()), b = bf16_parameters(GetParam());
    const auto with_masters = rule.make({{a, 1e-2, 0.01}}),
               with_remainders = rule.make({{b, 1e-2, 0.01}});
    with_remainders->set_state_options({.masters = MasterStorage::remainder});
    for (std::size_t i = 0; i < 2; ++i) {
      const auto start = [&] {
        return test::random_tensor(a[i].tensor.shape(), DType::f32, GetParam(), 10 + i);
      };
      kernels::MasterWeight::assign(a[i].tensor, start());
      kernels::MasterWeight::assign(b[i].tensor, start(), MasterStorage::remainder);
    }
    for (std::uint64_t step = 0; step < 20; ++step) {
      train(*with_masters, a, 7 * step);
      train(*with_remainders, b, 7 * step);
    }
    EXPECT_EQ(exact(a), exact(b));
    EXPECT_NE(test::kept_as(b[0].tensor), MasterStorage::f32);
    EXPECT_EQ(kernels::MasterWeight::of(b[0].tensor)->tensor().dtype(), DType::i16);
    EXPECT_NE(test::kept_as(b[2].tensor), MasterStorage::remainder);
  }
}

TEST_P(StorageOnDevice, Bf16MomentsFollowTheRule) {
  const NamedTensors parameters = bf16_parameters(GetParam());
  FusedAdam optimizer(parameters, {.lr = 1e-2});
  optimizer.set_state_options({.moments = DType::bf16});
  std::vector<reference::Adam> references(3, {{.lr = 1e-2}});
  std::vector<Values> expected = values(parameters);
  for (std::uint64_t step = 0; step < 6; ++step) {
    write_gradients(parameters, 9 * step);
    for (std::size_t i = 0; i < 3; ++i) {
      references[i].update(expected[i], values(parameters[i].tensor.grad()));
      auto& [m, v, updates] = references[i].moments;
      m = rounded(m, DType::bf16), v = rounded(v, DType::bf16);
    }
    expect_applied(optimizer.step());
  }
  // The moments' roundings may differ at near ties: 2^-9 of an update of at most lr or so.
  expect_weights(parameters, expected, 0, 1e-4);
}

TEST_P(StorageOnDevice, FilesAreTheSameAndLoadsConvert) {
  for (const Rule& rule : rules()) {
    SCOPED_TRACE(rule.name);
    const NamedTensors a = bf16_parameters(GetParam()), b = bf16_parameters(GetParam());
    const auto plain = rule.make({{a, 1e-2, 0.01}}), small = rule.make({{b, 1e-2, 0.01}});
    small->set_state_options(kSmall);
    for (std::uint64_t step = 0; step < 3; ++step) train(*small, b, 7 * step);
    const StateDict file = snapshot(small->state_dict());
    for (const auto& [key, value] : file.dict("state").dict("layer").dict("weight")) {
      const auto* tensor = std::get_if<Tensor>(&value);
      EXPECT_TRUE(tensor == nullptr || tensor->dtype() == DType::f32) << key;
    }
    plain->load_state_dict(file);
    copy_values(b, a);
    plain->set_state_options(kSmall);  // exact: the moments are bf16 values
    train(*plain, a, 99);
    train(*small, b, 99);
    EXPECT_EQ(exact(a), exact(b));
    small->load_state_dict(file);  // back, and on
    EXPECT_EQ(small->steps(), 3);
  }
}
INSTANTIATE_TEST_SUITE_P(Devices, StorageOnDevice, testing::ValuesIn(test::devices()),
                         test::device_name);

TEST(Storage, BytesOfAParameter) {
  const auto state = [] { return test::bytes_of(core::MemoryCategory::optimizer_state); };
  for (const bool small : {false, true}) {
    const std::size_t before = state();
    const NamedTensors parameters = {make_parameter("w", {4096}, 1, DType::bf16)};
    FusedAdam optimizer(parameters);
    if (small) optimizer.set_state_options(kSmall);
    EXPECT_EQ(state(), before);
    train(optimizer, parameters, 1);
    EXPECT_EQ(state() - before, 4096u * (small ? 2 + 4 : 4 + 8));
    optimizer.set_master_weights(false);
    EXPECT_EQ(state() - before, 4096u * (small ? 4 : 8));
  }
}

TEST(Storage, ConvertsOnTheWay) {
  const NamedTensors parameters = bf16_parameters();
  FusedAdam optimizer(parameters, {.lr = 1e-2});
  train(optimizer, parameters, 1);
  const Values truth = exact(parameters[0].tensor);
  optimizer.set_state_options({.masters = MasterStorage::remainder});
  optimizer.set_lr(0.0);
  train(optimizer, parameters, 2, 0.0);
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::f32);
  EXPECT_EQ(exact(parameters[0].tensor), truth);
  optimizer.set_state_options({});
  train(optimizer, parameters, 2, 0.0);
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::remainder);
  EXPECT_EQ(values(kernels::MasterWeight::of(parameters[0].tensor)->tensor()), truth);
  optimizer.set_master_weights(false);
  EXPECT_NE(test::kept_as(parameters[0].tensor), MasterStorage::f32);
}

// A file of f32 weights loaded into a half model leaves masters, which an optimizer without them
// drops in its first step.
TEST(Storage, AStepWithoutMemoryDropsNoMaster) {
  const NamedTensors parameters = bf16_parameters();
  const Tensor& weight = parameters[0].tensor;
  FusedAdam optimizer(parameters);
  optimizer.set_master_weights(false);
  kernels::MasterWeight::assign(weight, Tensor::full(weight.shape(), 1.1, DType::f32));
  write_gradients(parameters, 1);
  const Device device = core::default_device();
  core::set_memory_capacity(device, core::memory_stats(device).current_total);
  EXPECT_THROW((void)optimizer.step(), core::OutOfMemory);
  core::set_memory_capacity(device, SIZE_MAX);
  EXPECT_FLOAT_EQ(exact(weight)[0], 1.1f);
  expect_applied(optimizer.step());
  EXPECT_FALSE(kernels::MasterWeight::exists(weight));
}

TEST(Storage, RefusesWhatCannotBe) {
  const NamedTensors parameters = {make_parameter("half", {4}, 1, DType::f16),
                                   make_parameter("single", {4}, 1)};
  FusedSGD optimizer(parameters, {});
  EXPECT_THAT(
      message_of([&] { optimizer.set_state_options({.masters = MasterStorage::remainder}); }),
      HasSubstr("'half' of f16"));
  EXPECT_THROW(optimizer.set_state_options({.moments = DType::f16}), core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[1].tensor, Tensor::zeros({4})),
               core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[0].tensor, Tensor::zeros({3})),
               core::InvalidArgument);
  EXPECT_THROW(kernels::MasterWeight::assign(parameters[0].tensor, Tensor::zeros({4}),
                                             MasterStorage::remainder),
               core::InvalidArgument);
}

TEST(Storage, TheMasterTakesOverUnsharedMemory) {
  const Tensor half = make_parameter("w", {8}, 1, DType::f16).tensor;
  Tensor given = test::random_tensor({8}, DType::f32, core::default_device(), 5);
  const Values truth = values(given);
  const void* memory = given.raw_data();
  kernels::MasterWeight::assign(half, given);  // the caller still has it
  EXPECT_NE(kernels::MasterWeight::of(half)->tensor().raw_data(), memory);
  kernels::MasterWeight::assign(half, std::move(given));
  EXPECT_EQ(kernels::MasterWeight::of(half)->tensor().raw_data(), memory);
  EXPECT_EQ(exact(half), truth);
  EXPECT_EQ(values(half), rounded(truth, DType::f16));
}

}  // namespace
}  // namespace cairn::optim
