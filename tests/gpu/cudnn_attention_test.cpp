// Attention through the simulated cuDNN: what Cairn asks of it, what it leaves to its own kernels,
// and what it makes of refusals.
#include <cudnn.h>
#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/attention.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/product_choices.h"
#include "cuda/cudnn/attention.h"
#include "cuda/cudnn/attention_plan.h"
#include "gpu/timed_choices.h"
#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using kernels::AttentionOptions;
using kernels::cuda::SdpaShape;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Device kGpu{core::DeviceType::cuda, 0}, kOther{core::DeviceType::cuda, 1};
constexpr const char *kRun = "cudnnBackendExecute", *kPropose = "cudnnBackendFinalize(heuristics)",
                     *kBuild = "cudnnBackendFinalize(plan)", *kCompile = "cudnn compilation";

/// A setting of the environment, for as long as it lives.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

/// One attention with all that its passes need, on the CPU.
struct Attended {
  std::int64_t B = 1, H = 2, G = 2, T = 20, S = 20, D = 16;
  AttentionOptions options{.causal = true, .scale = 0.25};
  DType dtype = DType::f16;
  bool interleaved = false;  // heads as a projection's output has them

  struct Results {
    std::vector<double> y, lse, dq, dk, dv;
  };

  Results on(Device device) const {
    const Tensor q = operand(H, T, device, 1), k = operand(G, S, device, 2),
                 v = operand(G, S, device, 3), dy = operand(H, T, device, 4);
    const Tensor y = empty(H, T, device), dq = empty(H, T, device), dk = empty(G, S, device),
                 dv = empty(G, S, device);
    const Tensor lse = Tensor::empty({B, H, T}, wide(), device);
    Tensor lengths;
    AttentionOptions there = options;
    if (options.key_lengths.defined()) {
      lengths = Tensor::from(std::vector<double>(static_cast<std::size_t>(B), 7.0), {B}, DType::i64,
                             device);
      there.key_lengths = lengths;
    }
    kernels::attention(q, k, v, y, lse, there);
    kernels::attention_backward(q, k, v, y, lse, dy, dq, dk, dv, there);
    return {y.to_vector<double>(), lse.to_vector<double>(), dq.to_vector<double>(),
            dk.to_vector<double>(), dv.to_vector<double>()};
  }

  /// As it is asked for, but of packed operands.
  SdpaShape shape(bool backward) const {
    const kernels::cuda::HeadStrides q{H * T * D, T * D, D}, k{G * S * D, S * D, D};
    return {.backward = backward,
            .causal = options.causal,
            .dtype = dtype,
            .batch = B,
            .heads = H,
            .key_heads = G,
            .queries = T,
            .keys = S,
            .columns = D,
            .q = q,
            .k = k,
            .v = k,
            .y = q,
            .dy = q,
            .dq = q,
            .dk = k,
            .dv = k};
  }

 private:
  DType wide() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  Tensor laid_out(const Tensor& stored) const {
    return interleaved ? stored.alias(stored.view().permute({0, 2, 1, 3})) : stored;
  }
  core::Shape stored(std::int64_t heads, std::int64_t rows) const {
    return interleaved ? core::Shape{B, rows, heads, D} : core::Shape{B, heads, rows, D};
  }
  Tensor operand(std::int64_t heads, std::int64_t rows, Device device, std::uint64_t seed) const {
    return laid_out(random_tensor(stored(heads, rows), dtype, device, seed));
  }
  Tensor empty(std::int64_t heads, std::int64_t rows, Device device) const {
    return laid_out(Tensor::full(stored(heads, rows), std::nan(""), dtype, device));
  }
};

void expect_same(const Attended::Results& actual, const Attended::Results& expected,
                 double error = 0x1p-8) {
  expect_close(actual.y, expected.y, error, error, "y");
  expect_close(actual.lse, expected.lse, 1e-4, 1e-4, "lse");
  expect_close(actual.dq, expected.dq, error, error, "dq");
  expect_close(actual.dk, expected.dk, error, error, "dk");
  expect_close(actual.dv, expected.dv, error, error, "dv");
}

class CudnnAttention : public VendorTest {
 protected:
  CudnnAttention() { kernels::set_product_routes("default"); }  // plans begin anew

  /// That so many passes of two ran through cuDNN, with the CPU's results.
  static void expect_runs(const Attended& attended, std::uint64_t passes) {
    const CallCount runs(kRun);
    expect_same(attended.on(kGpu), attended.on({}),
                attended.dtype == DType::bf16 ? 0x1p-5 : 0x1p-8);
    EXPECT_EQ(runs(), passes);
  }
};
using CudnnAttentionDeathTest = CudnnAttention;

TEST_F(CudnnAttention, AgreesWithTheCpus) {
  const AttentionOptions all{.scale = 0.3}, causal{.causal = true, .scale = 0.3};
  for (Attended attended :
       {Attended{.options = all}, Attended{.options = causal},
        Attended{.T = 9, .S = 70, .options = causal}, Attended{.T = 70, .S = 9, .options = all},
        Attended{.T = 1, .S = 1, .D = 8, .options = causal},
        Attended{.B = 2, .H = 6, .G = 2, .T = 33, .S = 40, .options = causal},
        Attended{.B = 2, .H = 3, .G = 1, .D = 33, .options = all},
        Attended{.D = 256, .options = {.causal = true, .scale = 0.06}}}) {
    for (const bool interleaved : {false, true}) {
      for (const DType dtype : {DType::f16, DType::bf16}) {
        attended.interleaved = interleaved, attended.dtype = dtype;
        expect_runs(attended, 2);
      }
    }
  }
}

TEST_F(CudnnAttention, IsLeftToOwnKernelsWhereItPromisesLess) {
  const Tensor lengths = Tensor::full({1}, 7.0, DType::i64, Device());
  expect_runs({.options = {.scale = 0.3, .key_lengths = lengths}}, 0);
  expect_runs({.T = 9, .S = 8}, 0);
  expect_runs({.options = {.scale = -0.3}}, 0);
  expect_runs({.dtype = DType::f32}, 0);
  const Setting own("CAIRN_ATTENTION", "own");
  expect_runs({}, 0);
}

TEST_F(CudnnAttention, DropsNothingItself) {
  const Attended dropped{.options = {.scale = 0.3, .dropout = 0.4, .draw = {3, 1}}};
  expect_runs(dropped, 0);
}

TEST_F(CudnnAttention, TheSettingIsOneOfTwo) {
  const Setting misspelt("CAIRN_ATTENTION", "cuDNN");
  EXPECT_THAT([] { (void)Attended{}.on(kGpu); },
              ThrowsMessage<core::InvalidArgument>(
                  HasSubstr("expected CAIRN_ATTENTION to be cudnn or own, got cuDNN")));
}

TEST_F(CudnnAttention, KeysThatHeadsShareByStrideZeroAreLeftToOwnKernels) {
  const Tensor q = random_tensor({1, 4, 9, 16}, DType::f16, kGpu, 1);
  const Tensor k = random_tensor({1, 1, 9, 16}, DType::f16, kGpu, 2);
  const Tensor y = Tensor::empty({1, 4, 9, 16}, DType::f16, kGpu), same = Tensor::empty_like(y);
  const Tensor lse = Tensor::empty({1, 4, 9}, DType::f32, kGpu);
  const CallCount runs(kRun);
  const TensorView shared = k.view().expand({1, 4, 9, 16});
  kernels::attention(q, shared, shared, y, lse, {.scale = 0.25});
  EXPECT_EQ(runs(), 0u);
  kernels::attention(q, k, k, same, lse, {.scale = 0.25});
  EXPECT_EQ(runs(), 1u);
  expect_close(y.to_vector<double>(), same.to_vector<double>(), 0x1p-8, 0x1p-8);
}

/// In a process whose GPUs are of another kind: how often cuDNN ran forward and backward.
void expect_passes_on(const char* capability, std::int64_t D, std::uint64_t passes) {
  const Setting setting("CAIRN_SIM_CAPABILITY", capability);
  const auto run = [&] {
    const CallCount runs(kRun);
    const Attended attended{.D = D, .options = {.causal = true, .scale = 0.1}};
    expect_same(attended.on(kGpu), attended.on({}));
    std::_Exit(runs() == passes && !testing::Test::HasFailure() ? 0 : 1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "") << capability << " D " << D;
}

TEST_F(CudnnAttentionDeathTest, EachKindOfGpuIsAskedForWhatItHas) {
  expect_passes_on("75", 64, 0);
  expect_passes_on("80", 128, 2);
  expect_passes_on("80", 136, 1);
  expect_passes_on("90", 136, 2);
  expect_passes_on("100", 64, 1);  // its backward may add in any order
  expect_passes_on("120", 64, 2);
}

TEST_F(CudnnAttention, GivesTheSameBitsInEveryRun) {
  const Attended attended{.H = 4, .G = 2, .T = 40, .S = 70, .dtype = DType::bf16};
  const auto once = attended.on(kGpu);
  const CallCount runs(kRun);
  for (int i = 0; i < 3; ++i) {
    const auto again = attended.on(kGpu);
    EXPECT_EQ(again.y, once.y);
    EXPECT_EQ(again.dq, once.dq);
    EXPECT_EQ(again.dk, once.dk);
    EXPECT_EQ(again.dv, once.dv);
  }
  EXPECT_EQ(runs(), 6u);
}

TEST_F(CudnnAttention, TakesNothingThatRoundsMoreOrWantsTooMuch) {
  const kernels::cuda::Queue queue("attention", kGpu);
  for (const bool backward : {false, true}) {
    const auto plans = kernels::cuda::sdpa_plans_for(Attended{.T = 21, .S = 21}.shape(backward));
    std::size_t n = 0;
    for (; const auto plan = plans->at(queue, n); ++n)
      EXPECT_THAT(plan->name(), testing::Not(testing::MatchesRegex("[012]( .*)?")));
    EXPECT_EQ(n, backward ? 3u : 4u);
  }
}

TEST_F(CudnnAttention, HasNoPlanForWhatItsDocumentsRefuse) {
  const kernels::cuda::Queue queue("attention", kGpu);
  const auto has_plan = [&](const Attended& attended, bool backward) {
    return kernels::cuda::sdpa_plans_for(attended.shape(backward))->at(queue, 0) != nullptr;
  };
  EXPECT_TRUE(has_plan({.D = 256}, true));
  EXPECT_FALSE(has_plan({.D = 12}, false)) << "no multiple of 8";
  EXPECT_FALSE(has_plan({.D = 264}, false));
  EXPECT_FALSE(has_plan({.D = 264}, true));
  EXPECT_FALSE(has_plan({.dtype = DType::f32}, false));
  SdpaShape odd = Attended{}.shape(false);
  odd.q.row = 17, odd.q.head = 17 * 20, odd.q.batch = 17 * 40;
  EXPECT_EQ(kernels::cuda::sdpa_plans_for(odd)->at(queue, 0), nullptr) << "rows not aligned";
}

TEST_F(CudnnAttentionDeathTest, QueriesWithoutKeysAreNamed) {
  const kernels::cuda::Queue queue("attention", kGpu);
  const SdpaShape shape = Attended{.T = 22, .S = 21}.shape(false);
  EXPECT_DEATH((void)kernels::cuda::sdpa_plans_for(shape)->at(queue, 0),
               "gpusim: cudnn contract: .*no more queries than keys, got 22 and 21");
}

TEST_F(CudnnAttention, TakesTheNextPlanWhereOneRefuses) {
  const Attended attended{.T = 23, .S = 23};
  gpusim::inject(kRun, 1, CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH);
  expect_runs(attended, 3);
  gpusim::inject(kBuild, 1, CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING);
  expect_runs({.T = 24, .S = 24}, 2);
}

TEST_F(CudnnAttention, OwnKernelsComputeWhereEveryPlanRefuses) {
  const Attended attended{.H = 4, .G = 2, .T = 25, .S = 25, .interleaved = true};
  const auto expected = attended.on({});
  gpusim::inject(kRun, 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  expect_same(attended.on(kGpu), expected);
  gpusim::clear_injected();
  gpusim::inject(kPropose, 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  const Attended other{.T = 26, .S = 26};
  expect_runs(other, 0);
  gpusim::clear_injected();
  const CallCount proposals(kPropose);
  expect_runs(other, 0);
  EXPECT_EQ(proposals(), 0u) << "what has no plan is asked for once";
}

TEST_F(CudnnAttention, FailuresAreErrors) {
  gpusim::inject(kRun, 1, CUDNN_STATUS_EXECUTION_FAILED);
  const Attended attended{.T = 27, .S = 27};
  EXPECT_THAT([&] { (void)attended.on(kGpu); },
              ThrowsMessage<core::DeviceError>(HasSubstr("cudnnBackendExecute to succeed")));
  gpusim::clear_injected();
  expect_runs(attended, 2);
}

TEST_F(CudnnAttention, PlansAreMadeOnceForAShapeAndADevice) {
  const Attended attended{.T = 28, .S = 28};
  const auto expected = attended.on({});
  expect_same(attended.on(kGpu), expected);
  const CallCount proposals(kPropose), builds(kBuild);
  Attended scaled = attended;
  scaled.options.scale = 0.5;
  expect_same(attended.on(kGpu), expected);
  expect_same(scaled.on(kGpu), scaled.on({}));
  EXPECT_EQ(proposals() + builds(), 0u) << "nor for another scale";
  expect_same(attended.on(kOther), expected);
  EXPECT_GT(builds(), 0u);
}

TEST_F(CudnnAttention, ThreadsShareThePlansOfAShape) {
  const Attended attended{.T = 29, .S = 29};
  const auto expected = attended.on({});
  std::vector<std::thread> threads;
  for (const Device device : {kGpu, kOther, kGpu}) {
    threads.emplace_back([&, device] {
      const core::StreamGuard guard(core::Stream::create(device));
      for (int i = 0; i < 3; ++i) expect_same(attended.on(device), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Attention of 30 queries to themselves, recorded into a graph.
struct RecordedAttention {
  explicit RecordedAttention(std::int64_t D)
      : q(random_tensor({1, 2, 30, D}, DType::f16, kGpu, 1)), y(Tensor::empty_like(q)) {
    graph.warm_up([this] { run(); });
    warmed_up = y.to_vector();
    graph.capture([this] { run(); });
  }
  void run() const { kernels::attention(q, q, q, y, lse, {.causal = true, .scale = 0.25}); }
  void expect_replayed(const std::vector<double>& expected) {
    kernels::fill(y.view(), 0.0);
    graph.replay();
    EXPECT_EQ(y.to_vector(), expected);
  }

  core::StreamGuard guard{core::Stream::create(kGpu)};
  Tensor q, y, lse = Tensor::empty({1, 2, 30}, DType::f32, kGpu);
  core::Graph graph{kGpu};
  std::vector<double> warmed_up;  // y then
};

TEST_F(CudnnAttention, GraphsKeepTheNumbersThatWereCaptured) {
  RecordedAttention recorded(16);
  recorded.expect_replayed(recorded.warmed_up);
}

TEST_F(CudnnAttention, ManySamplesAreTakenInParts) {
  // A head's scores take 16 KiB at least, the limit is 256 MiB.
  const Attended attended{.B = 3, .H = 7000, .G = 7000, .T = 1, .S = 1, .D = 8};
  expect_runs(attended, 3);
  const kernels::cuda::Queue queue("attention_backward", kGpu);
  const auto may_ask = [&](std::int64_t heads, std::int64_t length, bool backward) {
    const TensorView q(nullptr, {1, heads, length, 8},
                       core::contiguous_strides({1, heads, length, 8}), DType::f16, kGpu);
    return kernels::cuda::sdpa_may_ask(queue, q, q, {}, backward);
  };
  EXPECT_TRUE(may_ask(16384, 1, true));
  EXPECT_FALSE(may_ask(16385, 1, true));
  EXPECT_TRUE(may_ask(16385, 1, false));
  EXPECT_TRUE(may_ask(2, 8192, true));
  EXPECT_FALSE(may_ask(2, 8193, true));
}

// ---- Lengths that change from step to step

constexpr std::int64_t kOwnLengths = 8;  // that have plans of their own

/// Fifty others up to 189: of three classes.
std::vector<std::int64_t> changing_lengths() {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 50; ++i) lengths.push_back(3 + i * 47 % 187);
  return lengths;
}

TEST_F(CudnnAttention, LengthsThatChangeShareAFewPlans) {
  const CallCount compilations(kCompile), runs(kRun);
  const auto attended = [](std::int64_t T) { return Attended{.G = 1, .T = T, .S = T, .D = 8}; };
  for (const std::int64_t T : changing_lengths())
    expect_same(attended(T).on(kGpu), attended(T).on({}));
  EXPECT_EQ(runs(), 100u);
  constexpr std::uint64_t kPasses = 2, kTried = 2;  // one wants too much workspace
  EXPECT_LE(compilations(), kPasses * kTried * (kOwnLengths + 3));
  const CallCount proposals(kPropose), builds(kBuild);
  for (const std::int64_t T : changing_lengths()) (void)attended(T).on(kGpu);
  EXPECT_EQ(proposals() + builds(), 0u);
}

/// Rows of zeros that an attention of queries to as many keys gets, or -1.
class RowsOfZeros {
 public:
  explicit RowsOfZeros(bool backward = false, bool causal = true, std::int64_t heads = 1,
                       Device device = kGpu)
      : queue_("attention", device), backward_(backward), heads_(heads) {
    options_.causal = causal;
  }
  std::int64_t operator()(std::int64_t T, std::int64_t more_keys = 0) const {
    const auto view = [&](std::int64_t length) {
      return TensorView(nullptr, {1, heads_, length, 8}, DType::f16, queue_.device());
    };
    return kernels::cuda::sdpa_rows_of_zeros(queue_, view(T), view(T + more_keys), options_,
                                             backward_)
        .value_or(-1);
  }
  void use_up() const {
    for (std::int64_t T = 1; T <= kOwnLengths; ++T) EXPECT_EQ((*this)(T), 0);
  }

 private:
  kernels::cuda::Queue queue_;
  bool backward_;
  std::int64_t heads_;
  AttentionOptions options_;
};

TEST_F(CudnnAttention, TheFirstLengthsOfAKindAndWholeClassesAreTakenAsTheyAre) {
  const RowsOfZeros zeros;
  for (const std::int64_t T : {64, 128, 512, 576, 1024, 1152, 8192}) EXPECT_EQ(zeros(T), 0);
  zeros.use_up();
  EXPECT_EQ(zeros(9), 55);
  EXPECT_EQ(zeros(577), 63);
  EXPECT_EQ(zeros(1025), 127);
  EXPECT_EQ(zeros(1), 0);
  for (const RowsOfZeros& other :
       {RowsOfZeros(true), RowsOfZeros(false, false), RowsOfZeros(false, true, 2),
        RowsOfZeros(false, true, 1, kOther)})
    EXPECT_EQ(other(9), 0);
}

TEST_F(CudnnAttention, OnlyQueriesThatSeeNoZerosGetSome) {
  const RowsOfZeros all(false, false), more_keys;
  all.use_up();
  EXPECT_EQ(all(9), -1);
  EXPECT_EQ(all(64), 0);
  for (std::int64_t T = 1; T <= kOwnLengths; ++T) EXPECT_EQ(more_keys(T, 2), 0);
  EXPECT_EQ(more_keys(9, 2), -1);
  EXPECT_EQ(more_keys(9), 55);
  expect_runs({.T = 9, .S = 9, .D = 8, .options = {.scale = 0.3}}, 2);  // of other heads
  const RowsOfZeros backward(true, true, 6);
  backward.use_up();
  EXPECT_EQ(backward(4650), -1) << "its scores fit into 256 MiB, those of 5,120 do not";
}

TEST_F(CudnnAttention, GraphsPadWhatTheyFind) {
  const RowsOfZeros zeros(false, true, 2);
  zeros.use_up();
  ASSERT_EQ(zeros(30), 34);
  RecordedAttention recorded(8);
  kernels::copy(random_tensor({1, 2, 30, 8}, DType::f16, kGpu, 2).view(), recorded.q.view());
  recorded.run();
  recorded.expect_replayed(recorded.y.to_vector());
}

TEST_F(CudnnAttention, OwnKernelsComputeWhereThePlansOfAClassRefuse) {
  for (std::int64_t T = 1; T <= kOwnLengths; ++T) (void)Attended{.T = T, .S = T}.on(kGpu);
  const Attended attended{.T = 33, .S = 33, .interleaved = true};
  const auto expected = attended.on({});
  gpusim::inject(kRun, 1, CUDNN_STATUS_NOT_SUPPORTED, true);
  expect_same(attended.on(kGpu), expected);
}

class ChosenCudnnAttention : public CudnnAttention {
  const TimedChoices timed_;
};

TEST_F(ChosenCudnnAttention, PlansComeBackWithASavedState) {
  const Attended attended{.T = 31, .S = 31};
  expect_runs(attended, 2);
  std::string saved = kernels::product_choices();
  EXPECT_THAT(saved, AllOf(HasSubstr("cudnn_attention"),
                           HasSubstr("backward f16 causal H 2 G 2 D 16 T 31 S 31 B 1 q"),
                           HasSubstr("3 2=2")));
  for (auto at = saved.find("3 2=2"); at != std::string::npos; at = saved.find("3 2=2", at))
    saved.replace(at, 5, "3 2=1");
  kernels::use_product_choices(saved);
  const CallCount proposals(kPropose);
  expect_runs(attended, 2);
  EXPECT_EQ(proposals(), 0u);
}

// Else the two runs would round otherwise.
TEST_F(ChosenCudnnAttention, AResumedRunTakesTheSameLengthsAsTheyAre) {
  for (std::int64_t T = 21; T <= 30; ++T) (void)Attended{.T = T, .S = T, .D = 24}.on(kGpu);
  const std::string saved = kernels::product_choices();
  EXPECT_THAT(saved, AllOf(HasSubstr("D 24 T 28 S 28 B 1 q"), HasSubstr("D 24 T 64 S 64 B 1 q"),
                           testing::Not(HasSubstr("T 29 S 29"))));
  kernels::use_product_choices(saved);
  const CallCount proposals(kPropose);
  for (std::int64_t T = 30; T >= 21; --T) expect_runs({.T = T, .S = T, .D = 24}, 2);
  EXPECT_EQ(proposals(), 0u);
}

}  // namespace
}  // namespace cairn::test
