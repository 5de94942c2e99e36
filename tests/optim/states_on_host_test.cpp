// A GPU's masters and moments on the host, which updates them: in pinned memory, or in files.
#include <gmock/gmock.h>

#include <filesystem>

#include "cairn/core/file_memory.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/weight_average.h"
#include "support.h"

namespace cairn::optim {
namespace {

using testing::AllOf;
using testing::HasSubstr;

NamedTensors make_parameters(DType dtype, Device device, std::int64_t rows) {
  NamedTensors all = {make_parameter("weight", {rows, 67}, 1, dtype, device),
                      make_parameter("bias", {7}, 2, dtype, device),
                      make_parameter("norm", {3000}, 3, DType::f32, device)};
  Tensor turned = Tensor::empty_strided({40, 50}, {1, 40}, dtype, device);
  kernels::copy(make_parameter("", {40, 50}, 4, dtype, device).tensor, turned);
  all.push_back({"turned", turned.set_requires_grad(true)});
  return all;
}

struct HostTrained {
  HostTrained(const Rule& rule, DType dtype, Device device, const StateOptions& states,
              std::int64_t rows = 91)
      : parameters(make_parameters(dtype, device, rows)),
        optimizer(rule.make({{parameters, 1e-2, 0.01}})) {
    optimizer->set_state_options(states);
  }
  void step(std::uint64_t seed) const { train(*optimizer, parameters, 9 * seed); }
  Tensor master() const { return kernels::MasterWeight::of(parameters[0].tensor)->tensor(); }
  Tensor moment() const {
    const StateDict state = optimizer->state_dict();
    return std::get<Tensor>(*state.dict("state").dict("weight").find("exp_avg"));
  }

  NamedTensors parameters;
  std::unique_ptr<Optimizer> optimizer;
};

class StatesOnHost : public testing::Test {
 protected:
  void SetUp() override {
    if (core::default_device().is_cpu()) GTEST_SKIP() << "no GPU here";
  }
  const Device gpu_ = core::default_device(), cpu_;
  const Rule adam_ = rules().front();
};

/// Everything of a training on the GPU is what it is with parameters on the CPU.
void expect_trained_alike(const HostTrained& host, const HostTrained& cpu) {
  const auto got = test::everything(host.parameters, *host.optimizer);
  const auto expected = test::everything(cpu.parameters, *cpu.optimizer);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    test::expect_close(got[i], expected[i], 1e-5, 1e-6, "");
}

TEST_F(StatesOnHost, TrainAsParametersOnTheHostDo) {
  for (const Rule& rule : rules()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(rule.name);
      const HostTrained host(rule, dtype, gpu_, {.on_host = true}), cpu(rule, dtype, cpu_, {});
      for (std::uint64_t step = 0; step < (rule.name == "Adam" ? 50 : 10); ++step) {
        host.step(step);
        cpu.step(step);
      }
      expect_trained_alike(host, cpu);
    }
  }
}

// No norm of the device's comes into it.
TEST_F(StatesOnHost, OfAdamHaveTheBitsOfTheHosts) {
  const std::int64_t rows = 4 * kernels::kFileBlock / 67 + 100;  // five blocks
  const std::string folder = std::filesystem::temp_directory_path();
  for (const DType moments : {DType::f32, DType::bf16}) {
    for (const StateOptions& states : {StateOptions{.moments = moments, .on_host = true},
                                       StateOptions{.moments = moments, .folder = folder}}) {
      const HostTrained host(adam_, DType::bf16, gpu_, states, rows),
          cpu(adam_, DType::bf16, cpu_, {.moments = moments}, rows);
      for (std::uint64_t step = 0; step < 2; ++step) {
        host.step(step);
        cpu.step(step);
      }
      EXPECT_EQ(test::everything(host.parameters, *host.optimizer),
                test::everything(cpu.parameters, *cpu.optimizer));
      EXPECT_EQ(core::lies_in_file(host.master()), !states.folder.empty());
    }
  }
}

TEST_F(StatesOnHost, LeaveWeightsAndGradientsOnTheDevice) {
  const std::size_t before = test::bytes_of(core::MemoryCategory::optimizer_state);
  const HostTrained host(adam_, DType::bf16, gpu_, {.on_host = true});
  host.step(1);
  host.step(2);
  EXPECT_EQ(test::bytes_of(core::MemoryCategory::optimizer_state), before);
  EXPECT_TRUE(host.master().device().is_cpu());
  EXPECT_TRUE(host.moment().device().is_cpu());
  EXPECT_TRUE(host.parameters[0].tensor.device().is_cuda());
  host.optimizer->set_state_options({});
  EXPECT_TRUE(host.master().device().is_cuda());
  EXPECT_TRUE(host.moment().device().is_cuda());
  EXPECT_GT(test::bytes_of(core::MemoryCategory::optimizer_state) - before, 6097u * 12);
}

TEST_F(StatesOnHost, ComeAndGoAndAreLoaded) {
  const HostTrained host(adam_, DType::bf16, gpu_, {.on_host = true}),
      cpu(adam_, DType::bf16, cpu_, {});
  for (std::uint64_t step = 0; step < 6; ++step) {
    host.optimizer->set_state_options({.on_host = step % 2 == 0});
    host.step(step);
    cpu.step(step);
  }
  expect_trained_alike(host, cpu);
  host.optimizer->set_state_options({.on_host = true});
  host.optimizer->load_state_dict(snapshot(cpu.optimizer->state_dict()));
  copy_values(cpu.parameters, host.parameters);
  host.step(10);
  cpu.step(10);
  EXPECT_EQ(test::everything(host.parameters, *host.optimizer),
            test::everything(cpu.parameters, *cpu.optimizer));
  EXPECT_TRUE(host.moment().device().is_cpu());
}

TEST_F(StatesOnHost, FollowWhatIsWrittenIntoWeights) {
  const HostTrained host(adam_, DType::f16, gpu_, {.on_host = true}),
      cpu(adam_, DType::f16, cpu_, {});
  for (std::uint64_t step = 0; step < 4; ++step) {
    for (const HostTrained* one : {&host, &cpu}) {
      if (step == 2) kernels::fill(one->parameters[0].tensor.view().slice(0, 3, 40), 0.25);
      one->step(step);
    }
  }
  EXPECT_EQ(test::everything(host.parameters, *host.optimizer),
            test::everything(cpu.parameters, *cpu.optimizer));
}

TEST_F(StatesOnHost, SkipAndAverageAndLarc) {
  const HostTrained host(rules()[2], DType::bf16, gpu_, {.on_host = true}),
      cpu(rules()[2], DType::bf16, cpu_, {});
  LARC of_host(*host.optimizer), of_cpu(*cpu.optimizer);
  host.step(0), cpu.step(0);
  write_gradients(host.parameters, 1, kInf);
  EXPECT_FALSE(host.optimizer->step().applied);
  WeightAverage average(host.parameters), expected(cpu.parameters);
  for (std::uint64_t step = 2; step < 5; ++step) {
    host.step(step), cpu.step(step);
    average.update(), expected.update();
  }
  expect_trained_alike(host, cpu);
  const auto averages = test::flat(average.state_dict()),
             of_the_cpu = test::flat(expected.state_dict());
  for (const auto& [name, values] : of_the_cpu) {
    test::expect_close(averages.at(name), values, 1e-5, 1e-6, name);
  }
  const auto averaged = average.use();
}

TEST_F(StatesOnHost, RefuseWhatCannotBe) {
  HostTrained remainders(adam_, DType::bf16, gpu_, {.masters = MasterStorage::remainder});
  EXPECT_THAT(message_of<core::Unsupported>([&] {
                remainders.optimizer->set_state_options(
                    {.masters = MasterStorage::remainder, .on_host = true});
              }),
              AllOf(HasSubstr("'weight' on cuda"), HasSubstr("MasterStorage::f32")));
  HostTrained host(adam_, DType::bf16, gpu_, {.on_host = true});
  EXPECT_THAT(message_of<core::Unsupported>([&] { host.optimizer->set_capturable(true); }),
              HasSubstr("on the host"));
  host.optimizer->set_state_options({});
  host.optimizer->set_capturable(true);
  EXPECT_THAT(
      message_of<core::Unsupported>([&] { host.optimizer->set_state_options({.on_host = true}); }),
      AllOf(HasSubstr("the host"), HasSubstr("set_capturable(false)")));
}

TEST(StatesOfTheHost, AreThereAlready) {
  const Rule adam = rules().front();
  const HostTrained plain(adam, DType::bf16, Device{}, {}),
      host(adam, DType::bf16, Device{}, {.masters = MasterStorage::remainder, .on_host = true});
  plain.step(1);
  host.step(1);
  EXPECT_EQ(exact(host.parameters), exact(plain.parameters));
  host.optimizer->set_capturable(true);
}

}  // namespace
}  // namespace cairn::optim
