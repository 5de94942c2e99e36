// The simulated cuDNN: right convolutions, and planted breaches of its contract.
#include <cudnn.h>
#include <gmock/gmock.h>

#include <array>
#include <chrono>
#include <cmath>
#include <thread>

#include "gpu/vendor_support.h"
#include "support/tensors.h"

namespace cairn::test {
namespace {

using gpusim::Element;
using Raw = cudnnBackendDescriptor_t;
using Sizes = std::array<std::int64_t, 4>;

#define OK(call) ASSERT_EQ(call, CUDNN_STATUS_SUCCESS)

std::int64_t count_of(const Sizes& s) {
  return s[0] * s[1] * s[2] * s[3];
}

// The simulated engines, by their index.
constexpr std::int64_t kSplitSums = 0, kUnbuilt = 1, kLow = 2, kTensorCores = 3, kWinograd = 4,
                       kPlain = 5;

enum class Pass { forward, backward_data, backward_filter };

struct Convolution {
  Pass pass = Pass::forward;
  Element element = Element::f32;
  bool channels_last = false;
  Sizes x{2, 4, 6, 5}, w{6, 4, 3, 3}, y{2, 6, 6, 5};
  std::int64_t padding = 1, stride = 1, dilation = 1;
  std::int64_t engine = kWinograd;  // exact, with workspace
  float alpha = 1.0f, beta = 0.0f;

  Sizes strides(const Sizes& s) const {
    if (channels_last) return {s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]};
    return {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
  }
  std::size_t place(const Sizes& s, std::int64_t n, std::int64_t c, std::int64_t h,
                    std::int64_t w_) const {
    const Sizes by = strides(s);
    return static_cast<std::size_t>(n * by[0] + c * by[1] + h * by[2] + w_ * by[3]);
  }
  cudnnDataType_t type() const {
    if (element == Element::f32) return CUDNN_DATA_FLOAT;
    return element == Element::f16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
  }
};

Raw make(cudnnBackendDescriptorType_t type) {
  Raw made = nullptr;
  EXPECT_EQ(cudnnBackendCreateDescriptor(type, &made), CUDNN_STATUS_SUCCESS);
  return made;
}

template <class T>
cudnnStatus_t set(Raw descriptor, int name, cudnnBackendAttributeType_t type, T value) {
  return cudnnBackendSetAttribute(descriptor, static_cast<cudnnBackendAttributeName_t>(name), type,
                                  1, &value);
}
template <class T, std::size_t N>
cudnnStatus_t set_all(Raw descriptor, int name, cudnnBackendAttributeType_t type,
                      const std::array<T, N>& values) {
  return cudnnBackendSetAttribute(descriptor, static_cast<cudnnBackendAttributeName_t>(name), type,
                                  N, values.data());
}
template <class T>
T get(Raw descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) {
  T value{};
  std::int64_t count = 0;
  EXPECT_EQ(cudnnBackendGetAttribute(descriptor, name, type, 1, &count, &value), 0);
  return value;
}

constexpr auto kInts = CUDNN_TYPE_INT64;
constexpr auto kNested = CUDNN_TYPE_BACKEND_DESCRIPTOR;

Raw tensor(const Convolution& c, std::int64_t id, const Sizes& sizes) {
  const Raw made = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  EXPECT_EQ(set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, kInts, id), 0);
  EXPECT_EQ(set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, c.type()), 0);
  EXPECT_EQ(set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kInts, std::int64_t{16}), 0);
  EXPECT_EQ(set_all(made, CUDNN_ATTR_TENSOR_DIMENSIONS, kInts, sizes), 0);
  EXPECT_EQ(set_all(made, CUDNN_ATTR_TENSOR_STRIDES, kInts, c.strides(sizes)), 0);
  return made;
}

Raw convolution(const Convolution& c) {
  const Raw made = make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const auto pair = [&](int name, std::int64_t value) {
    EXPECT_EQ(set_all(made, name, kInts, std::array{value, value}), 0);
  };
  EXPECT_EQ(set(made, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT), 0);
  EXPECT_EQ(set(made, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE,
                CUDNN_CROSS_CORRELATION),
            0);
  EXPECT_EQ(set(made, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, kInts, std::int64_t{2}), 0);
  pair(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, c.padding);
  pair(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, c.padding);
  pair(CUDNN_ATTR_CONVOLUTION_DILATIONS, c.dilation);
  pair(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, c.stride);
  return made;
}

/// Not finalised; names of attributes count up from FORWARD_ALPHA, in the same order in each pass.
Raw operation(const Convolution& c, Raw x, Raw w, Raw y, Raw how) {
  constexpr int kFirst[] = {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA};
  constexpr cudnnBackendDescriptorType_t kTypes[] = {
      CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
      CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
      CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR};
  const auto pass = static_cast<std::size_t>(c.pass);
  const Raw made = make(kTypes[pass]);
  const int first = kFirst[pass];
  EXPECT_EQ(set(made, first, CUDNN_TYPE_FLOAT, c.alpha), 0);
  EXPECT_EQ(set(made, first + 1, CUDNN_TYPE_FLOAT, c.beta), 0);
  EXPECT_EQ(set(made, first + 2, kNested, how), 0);
  EXPECT_EQ(set(made, first + 3, kNested, w), 0);
  EXPECT_EQ(set(made, first + 4, kNested, x), 0);
  EXPECT_EQ(set(made, first + 5, kNested, y), 0);
  return made;
}

/// The descriptors up to the graph; each is finalised, and `status` is the first failure.
struct Described {
  cudnnHandle_t handle = nullptr;
  Raw x, w, y, how, op = nullptr, graph = nullptr;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;

  explicit Described(const Convolution& c)
      : x(tensor(c, 'x', c.x)), w(tensor(c, 'w', c.w)), y(tensor(c, 'y', c.y)) {
    EXPECT_EQ(cudnnCreate(&handle), 0);
    how = convolution(c);
    for (const Raw descriptor : {x, w, y, how}) finalize(descriptor);
    if (status != CUDNN_STATUS_SUCCESS) return;
    op = operation(c, x, w, y, how);
    finalize(op);
    if (status != CUDNN_STATUS_SUCCESS) return;
    graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    EXPECT_EQ(set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle), 0);
    EXPECT_EQ(set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, kNested, op), 0);
    finalize(graph);
  }
  void finalize(Raw descriptor) {
    const cudnnStatus_t got = cudnnBackendFinalize(descriptor);
    if (status == CUDNN_STATUS_SUCCESS) status = got;
  }

  Raw engine(std::int64_t index) const {
    const Raw made = make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    EXPECT_EQ(set(made, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, kNested, graph), 0);
    EXPECT_EQ(set(made, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, kInts, index), 0);
    return made;
  }
  Raw config(std::int64_t index) const {
    const Raw its = engine(index);
    EXPECT_EQ(cudnnBackendFinalize(its), 0);
    const Raw made = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    EXPECT_EQ(set(made, CUDNN_ATTR_ENGINECFG_ENGINE, kNested, its), 0);
    EXPECT_EQ(cudnnBackendFinalize(made), 0);
    return made;
  }
  /// Not finalised.
  Raw plan(std::int64_t index) const {
    const Raw made = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    EXPECT_EQ(set(made, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle), 0);
    EXPECT_EQ(set(made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, kNested, config(index)), 0);
    return made;
  }
  /// The engines that a mode of the heuristics proposes, with their notes.
  std::vector<std::pair<std::int64_t, std::vector<int>>> proposed(
      cudnnBackendHeurMode_t mode) const {
    const Raw heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    EXPECT_EQ(set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, kNested, graph), 0);
    EXPECT_EQ(set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode), 0);
    EXPECT_EQ(cudnnBackendFinalize(heuristics), 0);
    std::vector<Raw> found(16);
    for (Raw& one : found) one = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    std::int64_t count = 0;
    EXPECT_EQ(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, kNested, 16,
                                       &count, found.data()),
              0);
    std::vector<std::pair<std::int64_t, std::vector<int>>> engines;
    for (std::int64_t i = 0; i < count; ++i) {
      Raw engine = make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
      std::int64_t one = 0, notes = 0;
      EXPECT_EQ(cudnnBackendGetAttribute(found[static_cast<std::size_t>(i)],
                                         CUDNN_ATTR_ENGINECFG_ENGINE, kNested, 1, &one, &engine),
                0);
      std::vector<int> noted(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
      EXPECT_EQ(cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                         CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
                                         &notes, noted.data()),
                0);
      noted.resize(static_cast<std::size_t>(notes));
      engines.emplace_back(get<std::int64_t>(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, kInts), noted);
    }
    return engines;
  }
};

/// A plan of a convolution, with its memory.
struct Prepared {
  Convolution c;
  Described d;
  Raw plan;
  std::vector<double> x_values, w_values, y_values;
  DeviceValues x, w, y, workspace;

  explicit Prepared(const Convolution& convolution)
      : c(convolution),
        d(c),
        plan(d.plan(c.engine)),
        x_values(random(c.x, 1)),
        w_values(random(c.w, 2)),
        y_values(random(c.y, 3)),
        x(c.element, x_values),
        w(c.element, w_values),
        y(c.element, y_values),
        workspace(Element::f32, 1 << 16) {
    EXPECT_EQ(cudnnBackendFinalize(plan), 0);
  }

  std::vector<double> random(const Sizes& sizes, std::uint64_t seed) const {
    return rounded(c.element, random_values(count_of(sizes), seed));
  }
  std::size_t needed() const {
    return static_cast<std::size_t>(
        get<std::int64_t>(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, kInts));
  }

  Raw pack(void* x_data, void* y_data, void* space) const {
    const Raw made = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const std::array<std::int64_t, 3> ids{'y', 'x', 'w'};
    EXPECT_EQ(set_all(made, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, kInts, ids), 0);
    EXPECT_EQ(set_all(made, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
                      std::array{y_data, x_data, w.data()}),
              0);
    EXPECT_EQ(set(made, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, space), 0);
    EXPECT_EQ(cudnnBackendFinalize(made), 0);
    return made;
  }
  cudnnStatus_t run() const { return run_with(x.data(), workspace.data()); }
  cudnnStatus_t run_with(void* x_data, void* space) const {
    return cudnnBackendExecute(d.handle, plan, pack(x_data, y.data(), space));
  }

  /// The sums of the pass over every term, in any order that comes.
  std::vector<double> expected() const {
    std::vector<double> sums(result_values().size(), 0.0);
    const std::int64_t out = c.y[1] / (c.x[1] / c.w[1]);
    const auto term = [&](auto n, auto o, auto h, auto w_, auto i, auto r, auto s) {
      const std::int64_t row = h * c.stride - c.padding + r * c.dilation;
      const std::int64_t column = w_ * c.stride - c.padding + s * c.dilation;
      if (row < 0 || row >= c.x[2] || column < 0 || column >= c.x[3]) return;
      const std::size_t in_y = c.place(c.y, n, o, h, w_), in_w = c.place(c.w, o, i, r, s),
                        in_x = c.place(c.x, n, o / out * c.w[1] + i, row, column);
      if (c.pass == Pass::forward) sums[in_y] += x_values[in_x] * w_values[in_w];
      if (c.pass == Pass::backward_data) sums[in_x] += y_values[in_y] * w_values[in_w];
      if (c.pass == Pass::backward_filter) sums[in_w] += x_values[in_x] * y_values[in_y];
    };
    const std::int64_t kernel = c.w[1] * c.w[2] * c.w[3];
    for (std::int64_t k = 0; k < count_of(c.y) * kernel; ++k) {
      const std::int64_t tap = k % kernel, image = k / kernel;
      term(image / (c.y[1] * c.y[2] * c.y[3]), image / (c.y[2] * c.y[3]) % c.y[1],
           image / c.y[3] % c.y[2], image % c.y[3], tap / (c.w[2] * c.w[3]), tap / c.w[3] % c.w[2],
           tap % c.w[3]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] *= double{c.alpha};
      if (c.beta != 0.0f) sums[i] += double{c.beta} * result_values()[i];
    }
    return rounded(c.element, sums);
  }
  const std::vector<double>& result_values() const {
    if (c.pass == Pass::forward) return y_values;
    return c.pass == Pass::backward_data ? x_values : w_values;
  }
  std::vector<double> result() const {
    if (c.pass == Pass::forward) return y.values();
    return c.pass == Pass::backward_data ? x.values() : w.values();
  }
  void expect_right(const std::string& what = "") const {
    expect_close(result(), expected(), 2e-7, 1e-12, what);
  }
  double worst_error() const {
    double worst = 0.0;
    const auto actual = result(), right = expected();
    for (std::size_t i = 0; i < actual.size(); ++i)
      worst = std::max(worst, std::abs(actual[i] - right[i]));
    return worst;
  }
};

using CudnnDeathTest = Cudnn;

constexpr Pass kPasses[] = {Pass::forward, Pass::backward_data, Pass::backward_filter};

TEST_F(Cudnn, ComputesEveryPass) {
  const Convolution strided{.y = {2, 6, 3, 3}, .stride = 2};
  const Convolution dilated{.x = {1, 4, 9, 8}, .y = {1, 6, 7, 6}, .dilation = 2};
  const Convolution grouped{.w = {6, 2, 3, 3}};
  for (Convolution c : {Convolution(), strided, dilated, grouped}) {
    for (const Pass pass : kPasses) {
      for (const bool channels_last : {false, true}) {
        for (const Element element : {Element::f16, Element::bf16, Element::f32}) {
          if (element == Element::f32 && c.w[1] == 2 && channels_last) continue;
          c.pass = pass, c.channels_last = channels_last, c.element = element;
          c.engine = element == Element::f32 ? kPlain : kTensorCores;
          const Prepared prepared(c);
          OK(prepared.run());
          prepared.expect_right(std::to_string(static_cast<int>(pass)));
        }
      }
    }
  }
}

TEST_F(Cudnn, ScalesAndAddsUnlessBetaIsZero) {
  for (const Pass pass : kPasses) {
    const Prepared prepared({.pass = pass, .alpha = 0.5f, .beta = 2.0f});
    OK(prepared.run());
    prepared.expect_right();
  }
  const Prepared plain(Convolution{});
  const DeviceValues fresh(Element::f32, plain.y_values.size());  // poison
  OK(cudnnBackendExecute(plain.d.handle, plain.plan,
                         plain.pack(plain.x.data(), fresh.data(), plain.workspace.data())));
  expect_close(fresh.values(), plain.expected(), 2e-7, 1e-12);
}

TEST_F(Cudnn, EnginesRoundAsTheirNotesSay) {
  const Prepared tf32({.engine = kTensorCores}), low({.engine = kLow}),
      half({.element = Element::bf16, .engine = kLow});
  for (const Prepared* prepared : {&tf32, &low, &half}) {
    OK(prepared->run());
    EXPECT_GT(prepared->worst_error(), 1e-5);
    EXPECT_LT(prepared->worst_error(), 0.3);
  }
}

TEST_F(Cudnn, HeuristicsProposeFirstWhatMustNotBeTaken) {
  const Described d({.pass = Pass::backward_filter});
  const auto a = d.proposed(CUDNN_HEUR_MODE_A), fallback = d.proposed(CUDNN_HEUR_MODE_FALLBACK);
  ASSERT_EQ(a.size(), 7u);
  EXPECT_EQ(a[0].first, kSplitSums);
  EXPECT_EQ(a[0].second, std::vector<int>{CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC});
  EXPECT_EQ(a[1].first, kUnbuilt);
  EXPECT_EQ(cudnnBackendFinalize(d.plan(kUnbuilt)), CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(a[2].first, kLow);
  EXPECT_THAT(a[2].second, testing::Contains(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS));
  ASSERT_EQ(fallback.size(), 1u);
  EXPECT_EQ(fallback[0].first, kPlain);
}

TEST_F(Cudnn, ConfigurationsTakeTheKnobsThatTheirEnginesHave) {
  const Described d(Convolution{});
  const auto finalized = [&](std::int64_t engine, cudnnBackendKnobType_t type, std::int64_t value) {
    const Raw knob = make(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    EXPECT_EQ(set(knob, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, type), 0);
    EXPECT_EQ(set(knob, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, kInts, value), 0);
    EXPECT_EQ(cudnnBackendFinalize(knob), 0);
    const Raw its = d.engine(engine), config = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    EXPECT_EQ(cudnnBackendFinalize(its), 0);
    EXPECT_EQ(set(config, CUDNN_ATTR_ENGINECFG_ENGINE, kNested, its), 0);
    EXPECT_EQ(set(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, kNested, knob), 0);
    return cudnnBackendFinalize(config);
  };
  EXPECT_EQ(finalized(kTensorCores, CUDNN_KNOB_TYPE_TILE_SIZE, 3), CUDNN_STATUS_SUCCESS);
  EXPECT_EQ(finalized(kTensorCores, CUDNN_KNOB_TYPE_TILE_SIZE, 4), CUDNN_STATUS_BAD_PARAM);
  EXPECT_EQ(finalized(kTensorCores, CUDNN_KNOB_TYPE_STAGES, 1), CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(finalized(kPlain, CUDNN_KNOB_TYPE_TILE_SIZE, 1), CUDNN_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(cudnnBackendFinalize(d.engine(7)), CUDNN_STATUS_NOT_SUPPORTED);
}

TEST_F(Cudnn, AnswersWhatDoesNotFit) {
  EXPECT_EQ(Described({.y = {2, 6, 5, 5}}).status, CUDNN_STATUS_BAD_PARAM) << "the height is 6";
  EXPECT_EQ(Described({.w = {6, 3, 3, 3}}).status, CUDNN_STATUS_BAD_PARAM) << "of 4 channels";
  const Described rows(Convolution{}), last({.channels_last = true}),
      half({.element = Element::f16});
  const auto refusal = [&](Raw w) {
    Described mixed(Convolution{});
    mixed.op = operation({}, mixed.x, w, mixed.y, mixed.how);
    mixed.finalize(mixed.op);
    mixed.graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    EXPECT_EQ(set(mixed.graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, mixed.handle),
              0);
    EXPECT_EQ(set(mixed.graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, kNested, mixed.op), 0);
    mixed.finalize(mixed.graph);
    EXPECT_EQ(mixed.status, CUDNN_STATUS_SUCCESS);
    return cudnnBackendFinalize(mixed.plan(kPlain));
  };
  EXPECT_EQ(refusal(rows.w), CUDNN_STATUS_SUCCESS);
  EXPECT_EQ(refusal(last.w), CUDNN_STATUS_NOT_SUPPORTED_LAYOUT);
  EXPECT_EQ(refusal(half.w), CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE);
  const Described grouped({.channels_last = true, .w = {6, 2, 3, 3}});
  EXPECT_EQ(cudnnBackendFinalize(grouped.plan(kPlain)), CUDNN_STATUS_NOT_SUPPORTED_LAYOUT);
  const Described large(
      {.x = {1, 1, 65536, 32768}, .w = {1, 1, 1, 1}, .y = {1, 1, 65536, 32768}, .padding = 0});
  EXPECT_EQ(cudnnBackendFinalize(large.plan(kPlain)), CUDNN_STATUS_NOT_SUPPORTED_SHAPE);
}

TEST_F(Cudnn, AnswersWhatIsIncompleteOrLate) {
  const Convolution c;
  for (const int missing :
       {CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_ATTR_TENSOR_STRIDES}) {
    const Raw made = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    for (const int name : {CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT}) {
      if (name == missing) continue;
      EXPECT_EQ(set(made, name, kInts, std::int64_t{16}), 0);
    }
    OK(set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT));
    for (const int name : {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_STRIDES}) {
      if (name == missing) continue;
      EXPECT_EQ(set_all(made, name, kInts, c.x), 0);
    }
    EXPECT_EQ(cudnnBackendFinalize(made), CUDNN_STATUS_BAD_PARAM) << missing;
  }
  for (const std::int64_t alignment : {0, 2, 3}) {
    const Raw made = tensor(c, 'x', c.x);
    OK(set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kInts, alignment));
    EXPECT_EQ(cudnnBackendFinalize(made), CUDNN_STATUS_BAD_PARAM) << alignment;
  }
  const Raw empty = tensor(c, 'x', {2, 0, 6, 5}), good = tensor(c, 'x', c.x);
  EXPECT_EQ(cudnnBackendFinalize(empty), CUDNN_STATUS_BAD_PARAM);
  const int id = CUDNN_ATTR_TENSOR_UNIQUE_ID;
  EXPECT_EQ(set(good, id, CUDNN_TYPE_FLOAT, 1.0f), CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE);
  EXPECT_EQ(set(good, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A),
            CUDNN_STATUS_BAD_PARAM);
  OK(cudnnBackendFinalize(good));
  EXPECT_EQ(cudnnBackendFinalize(good), CUDNN_STATUS_BAD_PARAM);
  EXPECT_EQ(set(good, id, kInts, std::int64_t{1}), CUDNN_STATUS_BAD_PARAM);
  const Raw early = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  const Described d(c);
  EXPECT_EQ(set(early, CUDNN_ATTR_OPERATIONGRAPH_OPS, kNested, operation(c, d.x, d.w, d.y, d.how)),
            CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  EXPECT_EQ(set(early, CUDNN_ATTR_OPERATIONGRAPH_OPS, kNested, d.x),
            CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE);
  std::int64_t count = 0, value = 0;
  EXPECT_EQ(cudnnBackendGetAttribute(early, CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, kInts, 1,
                                     &count, &value),
            CUDNN_STATUS_NOT_INITIALIZED);
}

TEST_F(Cudnn, AnswersRunsThatLackSomething) {
  const Prepared prepared(Convolution{});
  EXPECT_EQ(prepared.run_with(nullptr, prepared.workspace.data()),
            CUDNN_STATUS_BAD_PARAM_NULL_POINTER);
  EXPECT_EQ(prepared.run_with(prepared.x.data(), nullptr), CUDNN_STATUS_BAD_PARAM_NULL_POINTER);
  const Raw pack = prepared.pack(prepared.x.data(), prepared.y.data(), prepared.workspace.data());
  EXPECT_EQ(cudnnBackendExecute(prepared.d.handle, prepared.d.plan(kPlain), pack),
            CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  EXPECT_EQ(cudnnBackendExecute(prepared.d.handle, pack, prepared.plan),
            CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE);
  const Raw twice = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  OK(set_all(twice, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, kInts, std::array<std::int64_t, 2>{1, 1}));
  OK(set_all(twice, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
             std::array{prepared.x.data(), prepared.y.data()}));
  EXPECT_EQ(cudnnBackendFinalize(twice), CUDNN_STATUS_BAD_PARAM);
}

TEST_F(CudnnDeathTest, MisalignedImage) {
  const Prepared prepared(Convolution{});
  EXPECT_DEATH(
      prepared.run_with(static_cast<char*>(prepared.x.data()) + 4, prepared.workspace.data()),
      "gpusim: cudnn contract: .*the 16 bytes that its descriptor promises, got one "
      "aligned to 4");
}

TEST_F(CudnnDeathTest, HandleOfAnotherThread) {
  const Prepared prepared(Convolution{});
  EXPECT_DEATH(std::thread([&] {
                 (void)cudaSetDevice(0);
                 (void)prepared.run();
               }).join(),
               "gpusim: cudnn contract: .*thread that set the handle's stream");
  EXPECT_DEATH(std::thread([&] { (void)cudnnBackendFinalize(prepared.d.plan(kPlain)); }).join(),
               "gpusim: cudnn contract: .*thread that set the handle's stream");
}

// Calls until the process dies, for half a minute at most: a busy machine may run two threads by
// turns for long.
template <typename Call>
void repeat(const Call& call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < end) call();
}

TEST_F(CudnnDeathTest, HandleInTwoThreadsAtOnce) {
  const Prepared prepared(Convolution{});
  const auto use = [&] { repeat([&] { cudnnSetStream(prepared.d.handle, nullptr); }); };
  EXPECT_DEATH(
      {
        std::thread other(use);
        use();
        other.join();
      },
      "gpusim: cudnn contract: .*serves one thread at a time");
}

TEST_F(CudnnDeathTest, PlanInTwoThreadsAtOnce) {
  const Prepared prepared(Convolution{});
  const auto use = [&] {
    cudnnHandle_t own = nullptr;
    must(cudaSetDevice(0));
    cudnnCreate(&own);
    const Raw pack = prepared.pack(nullptr, prepared.y.data(), nullptr);  // is refused
    repeat([&] { cudnnBackendExecute(own, prepared.plan, pack); });
  };
  EXPECT_DEATH(
      {
        std::thread other(use);
        use();
        other.join();
      },
      "gpusim: cudnn contract: .*plan that serves one thread at a time");
}

TEST_F(CudnnDeathTest, HandleOfAnotherDevice) {
  const Prepared prepared(Convolution{});
  must(cudaSetDevice(1));
  EXPECT_DEATH((void)prepared.run(), "gpusim: cudnn contract: .*handle of the current device 1");
  cudaStream_t theirs = nullptr;
  must(cudaStreamCreateWithFlags(&theirs, cudaStreamNonBlocking));
  must(cudaSetDevice(0));
  EXPECT_DEATH(cudnnSetStream(prepared.d.handle, theirs),
               "gpusim: cudnn contract: .*stream of it, got a handle of 0 and a stream of 1");
}

TEST_F(CudnnDeathTest, PlanOfAnotherDevice) {
  const Prepared prepared(Convolution{});
  const Raw pack = prepared.pack(prepared.x.data(), prepared.y.data(), prepared.workspace.data());
  must(cudaSetDevice(1));
  cudnnHandle_t theirs = nullptr;
  OK(cudnnCreate(&theirs));
  EXPECT_DEATH(cudnnBackendExecute(theirs, prepared.plan, pack),
               "gpusim: cudnn contract: .*plan made for device 1, got one made for 0");
}

TEST_F(CudnnDeathTest, WorkspacePastItsAllocation) {
  const Prepared prepared(Convolution{});
  const DeviceValues little(Element::f32, 16);
  EXPECT_DEATH((void)prepared.run_with(prepared.x.data(), little.data()),
               "gpusim: cudnn contract: .*workspace of [0-9]+ bytes as told, got 64");
}

TEST_F(CudnnDeathTest, UseAfterDestroy) {
  const Prepared prepared(Convolution{});
  const Raw op = operation(prepared.c, prepared.d.x, prepared.d.w, prepared.d.y, prepared.d.how);
  OK(cudnnBackendDestroyDescriptor(prepared.d.w));
  EXPECT_DEATH((void)cudnnBackendFinalize(op), "gpusim: use after destroy: .*descriptor");
  OK(cudnnDestroy(prepared.d.handle));
  EXPECT_DEATH((void)prepared.run(), "gpusim: use after destroy: .*cudnn handle");
}

TEST_F(CudnnDeathTest, GraphThatOutlivesItsPlan) {
  const Prepared prepared(Convolution{});
  const Raw pack = prepared.pack(prepared.x.data(), prepared.y.data(), prepared.workspace.data());
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  OK(cudnnSetStream(prepared.d.handle, stream));
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  OK(cudnnBackendExecute(prepared.d.handle, prepared.plan, pack));
  cudaGraph_t graph = nullptr;
  must(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  must(cudaGraphInstantiate(&executable, graph, 0));
  must(cudaGraphLaunch(executable, stream));
  OK(cudnnBackendDestroyDescriptor(prepared.plan));  // after what runs
  must(cudaStreamSynchronize(stream));
  prepared.expect_right();
  EXPECT_DEATH(
      {
        cudaGraphLaunch(executable, stream);
        cudaStreamSynchronize(stream);
      },
      "gpusim: use after destroy: .*graph whose plans live as long");
}

}  // namespace
}  // namespace cairn::test
