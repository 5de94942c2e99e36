#include "gpu/sim/cudnn_descriptor.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

namespace cairn::gpusim {
namespace {

using Name = cudnnBackendAttributeName_t;
using Type = cudnnBackendAttributeType_t;
using Kind = cudnnBackendDescriptorType_t;

/// An attribute that a program may set.
struct Rule {
  Name name;
  Type type;
  std::int64_t most;  // elements
  bool required = true;
  std::set<Kind> kinds = {};  // of the descriptors, where it holds some
};

constexpr auto kDescriptors = CUDNN_TYPE_BACKEND_DESCRIPTOR;

Rule tensor_rule(Name name, bool required = true) {
  return {name, kDescriptors, 1, required, {CUDNN_BACKEND_TENSOR_DESCRIPTOR}};
}

std::vector<Rule> operation_rules(Name x, Name w, Name y, Name convolution, Name alpha, Name beta) {
  return {{x, kDescriptors, 1, true, {CUDNN_BACKEND_TENSOR_DESCRIPTOR}},
          {w, kDescriptors, 1, true, {CUDNN_BACKEND_TENSOR_DESCRIPTOR}},
          {y, kDescriptors, 1, true, {CUDNN_BACKEND_TENSOR_DESCRIPTOR}},
          {convolution, kDescriptors, 1, true, {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR}},
          {alpha, CUDNN_TYPE_FLOAT, 1},
          {beta, CUDNN_TYPE_FLOAT, 1}};
}

struct Known {
  const char* finalize_name;
  std::vector<Rule> rules;
};

const std::map<Kind, Known>& known() {
  static const auto& all = *new std::map<Kind, Known>{
      {CUDNN_BACKEND_TENSOR_DESCRIPTOR,
       {"cudnnBackendFinalize(tensor)",
        {{CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1},
         {CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1},
         {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1},
         {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, CUDNN_DIM_MAX},
         {CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, CUDNN_DIM_MAX},
         {CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, false},
         {CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, false}}}},
      {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR,
       {"cudnnBackendFinalize(convolution)",
        {{CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1},
         {CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1},
         {CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1},
         {CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, CUDNN_DIM_MAX},
         {CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, CUDNN_DIM_MAX},
         {CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, CUDNN_DIM_MAX},
         {CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, CUDNN_DIM_MAX}}}},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        operation_rules(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA)}},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        operation_rules(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA)}},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        operation_rules(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA)}},
      {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
       {"cudnnBackendFinalize(graph)",
        {{CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1},
         {CUDNN_ATTR_OPERATIONGRAPH_OPS,
          kDescriptors,
          64,
          true,
          {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
           CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
           CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
           CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
           CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
           CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_MATMUL_DESCRIPTOR,
       {"cudnnBackendFinalize(matmul)", {{CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1}}}},
      {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
       {"cudnnBackendFinalize(pointwise)",
        {{CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1},
         {CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1},
         {CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, false}}}},
      {CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
       {"cudnnBackendFinalize(reduction)",
        {{CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1},
         {CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1}}}},
      {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        {tensor_rule(CUDNN_ATTR_OPERATION_MATMUL_ADESC),
         tensor_rule(CUDNN_ATTR_OPERATION_MATMUL_BDESC),
         tensor_rule(CUDNN_ATTR_OPERATION_MATMUL_CDESC),
         {CUDNN_ATTR_OPERATION_MATMUL_DESC,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_MATMUL_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        {tensor_rule(CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
         tensor_rule(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, false),
         tensor_rule(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, false),
         tensor_rule(CUDNN_ATTR_OPERATION_POINTWISE_YDESC),
         {CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_POINTWISE_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        {tensor_rule(CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
         tensor_rule(CUDNN_ATTR_OPERATION_REDUCTION_YDESC),
         {CUDNN_ATTR_OPERATION_REDUCTION_DESC,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_REDUCTION_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
       {"cudnnBackendFinalize(operation)",
        {tensor_rule(CUDNN_ATTR_OPERATION_RESHAPE_XDESC),
         tensor_rule(CUDNN_ATTR_OPERATION_RESHAPE_YDESC)}}},
      {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
       {"cudnnBackendFinalize(heuristics)",
        {{CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1},
         {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_ENGINE_DESCRIPTOR,
       {"cudnnBackendFinalize(engine)",
        {{CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1},
         {CUDNN_ATTR_ENGINE_OPERATION_GRAPH,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR,
       {"cudnnBackendFinalize(knob choice)",
        {{CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1},
         {CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1}}}},
      {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
       {"cudnnBackendFinalize(engine configuration)",
        {{CUDNN_ATTR_ENGINECFG_ENGINE, kDescriptors, 1, true, {CUDNN_BACKEND_ENGINE_DESCRIPTOR}},
         {CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
          kDescriptors,
          CUDNN_KNOB_TYPE_COUNTS,
          false,
          {CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
       {"cudnnBackendFinalize(plan)",
        {{CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1},
         {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
          kDescriptors,
          1,
          true,
          {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR}}}}},
      {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
       {"cudnnBackendFinalize(variant pack)",
        {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 64},
         {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 64},
         {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, false}}}}};
  return all;
}

std::size_t bytes_of(Type type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
      return sizeof(std::int64_t);
    case CUDNN_TYPE_BOOLEAN:
      return sizeof(bool);
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return sizeof(void*);
    default:
      return sizeof(float);  // and enumerations
  }
}

cudnnStatus_t finalize_tensor(CudnnDescriptor& d) {
  const auto sizes = d.values<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto strides = d.values<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  const auto least = [](const auto& values) {
    return *std::min_element(begin(values), end(values));
  };
  if (sizes.size() != strides.size() || least(sizes) < 1 || least(strides) < 1)
    return CUDNN_STATUS_BAD_PARAM;
  if (sizes.size() != 4) report("not simulated", "a cuDNN tensor of other than four dimensions");
  d.tensor.id = d.value<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  d.tensor.type = d.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
  d.tensor.alignment = d.value<std::int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  std::copy(sizes.begin(), sizes.end(), d.tensor.sizes.begin());
  std::copy(strides.begin(), strides.end(), d.tensor.strides.begin());
  d.tensor.is_virtual = d.value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
  d.tensor.is_by_value = d.value<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
  const auto element = static_cast<std::int64_t>(size_of(d.tensor.element()));
  const std::int64_t alignment = d.tensor.alignment;
  const bool aligned = alignment >= element && (alignment & (alignment - 1)) == 0;
  return aligned ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t finalize_convolution(CudnnDescriptor& d) {
  const auto dims = d.value<std::int64_t>(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS);
  if (dims != 2) report("not simulated", "a cuDNN convolution of other than two dimensions");
  const auto pair = [&](Name name, std::int64_t least, std::array<std::int64_t, 2>& to) {
    const auto values = d.values<std::int64_t>(name);
    if (values.size() != 2 || *std::min_element(values.begin(), values.end()) < least) return false;
    std::copy(values.begin(), values.end(), to.begin());
    return true;
  };
  std::array<std::int64_t, 2> after{};
  if (!pair(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, 0, d.problem.padding) ||
      !pair(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, 0, after) ||
      !pair(CUDNN_ATTR_CONVOLUTION_DILATIONS, 1, d.problem.dilation) ||
      !pair(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, 1, d.problem.stride))
    return CUDNN_STATUS_BAD_PARAM;
  const auto mode = d.value<cudnnConvolutionMode_t>(CUDNN_ATTR_CONVOLUTION_CONV_MODE);
  if (mode != CUDNN_CROSS_CORRELATION || after != d.problem.padding)
    report("not simulated", "a flipped convolution, or one that is padded by two sizes");
  d.problem.compute = d.value<cudnnDataType_t>(CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
  return CUDNN_STATUS_SUCCESS;
}

/// The attributes in the order of their rules: x, w, y, convolution, alpha, beta.
cudnnStatus_t finalize_operation(CudnnDescriptor& d, CudnnPass pass) {
  const std::vector<Rule>& rules = known().at(d.type).rules;
  const auto descriptor = [&](std::size_t i) -> const CudnnDescriptor& {
    return *d.value<CudnnDescriptor*>(rules[i].name);
  };
  d.problem = descriptor(3).problem;
  d.problem.pass = pass;
  d.problem.x = descriptor(0).tensor, d.problem.w = descriptor(1).tensor;
  d.problem.y = descriptor(2).tensor;
  d.problem.alpha = double{d.value<float>(rules[4].name)};
  d.problem.beta = double{d.value<float>(rules[5].name)};
  const std::set ids{d.problem.x.id, d.problem.w.id, d.problem.y.id};
  return d.problem.is_consistent() && ids.size() == 3 ? CUDNN_STATUS_SUCCESS
                                                      : CUDNN_STATUS_BAD_PARAM;
}

/// Of an attention's: how it computes lies in a descriptor of its own.
cudnnStatus_t finalize_fusible(CudnnDescriptor& d, CudnnOperation::Kind kind,
                               const std::vector<Name>& inputs, Name y) {
  d.operation.kind = kind;
  for (const Name name : inputs) {
    if (d.attributes.contains(name))
      d.operation.inputs.push_back(d.value<CudnnDescriptor*>(name)->tensor);
  }
  d.operation.y = d.value<CudnnDescriptor*>(y)->tensor;
  for (const CudnnDescriptor* other : d.refers_to) {
    if (other->type == CUDNN_BACKEND_POINTWISE_DESCRIPTOR) {
      d.operation.mode = other->value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
      d.operation.axis = other->value<std::int64_t>(CUDNN_ATTR_POINTWISE_AXIS, -1);
    }
    if (other->type == CUDNN_BACKEND_REDUCTION_DESCRIPTOR)
      d.operation.mode = other->value<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR);
  }
  return CUDNN_STATUS_SUCCESS;
}

/// A convolution alone, or the operations of an attention.
cudnnStatus_t finalize_graph(CudnnDescriptor& d, int capability) {
  auto attention = std::make_shared<CudnnAttention>();
  attention->capability = capability;
  for (const auto* operation : d.values<CudnnDescriptor*>(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    const bool convolution = operation->operation.inputs.empty();
    if (convolution) return d.refers_to.size() == 1 ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
    attention->operations.push_back(operation->operation);
  }
  if (!attention->is_consistent()) return CUDNN_STATUS_BAD_PARAM;
  d.attention = std::move(attention);
  return CUDNN_STATUS_SUCCESS;
}

std::vector<CudnnEngine> engines_behind(const CudnnDescriptor& d) {
  return d.attention ? engines_of(*d.attention) : engines_of(d.problem);
}

cudnnStatus_t finalize_heuristics(CudnnDescriptor& d) {
  const auto mode = d.value<cudnnBackendHeurMode_t>(CUDNN_ATTR_ENGINEHEUR_MODE);
  d.results = d.attention ? proposals(*d.attention, mode) : proposals(d.problem, mode);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_engine(CudnnDescriptor& d) {
  d.config.engine = d.value<std::int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
  const auto engines = static_cast<std::int64_t>(engines_behind(d).size());
  const bool known = d.config.engine >= 0 && d.config.engine < engines;
  return known ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
}

CudnnEngine engine_of(const CudnnDescriptor& d) {
  return engines_behind(d)[static_cast<std::size_t>(d.config.engine)];
}

cudnnStatus_t finalize_config(CudnnDescriptor& d) {
  const CudnnEngine engine = engine_of(d);
  for (const auto* knob : d.values<CudnnDescriptor*>(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES)) {
    const auto type = knob->value<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE);
    d.config.tile = knob->value<std::int64_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE);
    if (!engine.has_tiles || type != CUDNN_KNOB_TYPE_TILE_SIZE) return CUDNN_STATUS_NOT_SUPPORTED;
    if (d.config.tile < 0 || d.config.tile >= kCudnnTiles) return CUDNN_STATUS_BAD_PARAM;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_plan(CudnnDescriptor& d) {
  const cudnnStatus_t status =
      d.attention ? check_support(*d.attention, d.config) : check_support(d.problem, d.config);
  if (status == CUDNN_STATUS_SUCCESS) d.unloaded = std::make_shared<bool>(false);
  return status;
}

cudnnStatus_t finalize_pack(CudnnDescriptor& d) {
  const auto ids = d.values<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = d.values<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  const bool distinct = std::set(ids.begin(), ids.end()).size() == ids.size();
  return distinct && ids.size() == pointers.size() ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t finalize_kind(CudnnDescriptor& d, int capability) {
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return finalize_tensor(d);
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
      return finalize_convolution(d);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return finalize_operation(d, CudnnPass::forward);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return finalize_operation(d, CudnnPass::backward_data);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return finalize_operation(d, CudnnPass::backward_filter);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return finalize_fusible(
          d, CudnnOperation::Kind::matmul,
          {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC},
          CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      return finalize_fusible(
          d, CudnnOperation::Kind::pointwise,
          {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
           CUDNN_ATTR_OPERATION_POINTWISE_TDESC},
          CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
      return finalize_fusible(d, CudnnOperation::Kind::reduction,
                              {CUDNN_ATTR_OPERATION_REDUCTION_XDESC},
                              CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      return finalize_fusible(d, CudnnOperation::Kind::reshape,
                              {CUDNN_ATTR_OPERATION_RESHAPE_XDESC},
                              CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      return finalize_graph(d, capability);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      return finalize_heuristics(d);
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
      return finalize_engine(d);
    case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR:
      return finalize_config(d);
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      return finalize_plan(d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      return finalize_pack(d);
    default:
      return CUDNN_STATUS_SUCCESS;
  }
}

/// What graphs, engines, configurations and plans know of what they are made of.
void inherit(CudnnDescriptor& d) {
  for (const CudnnDescriptor* other : d.refers_to) {
    if (other->type == CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR) continue;
    d.problem = other->problem, d.config = other->config, d.attention = other->attention;
  }
}

const Rule* rule_of(const CudnnDescriptor& d, Name name) {
  for (const Rule& rule : known().at(d.type).rules) {
    if (rule.name == name) return &rule;
  }
  return nullptr;
}

/// What is asked of a descriptor: numbers, or descriptors with their contents.
struct Answer {
  Type type = CUDNN_TYPE_INT64;
  std::int64_t count = 0;
  std::vector<char> bytes = {};
  std::vector<CudnnDescriptor> descriptors = {};
};

template <class T>
Answer answer(Type type, const std::vector<T>& values) {
  Answer given{.type = type, .count = static_cast<std::int64_t>(values.size())};
  given.bytes.resize(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(given.bytes.data(), values.data(), given.bytes.size());
  return given;
}

Answer answer(std::vector<CudnnDescriptor> descriptors) {
  Answer given{.type = kDescriptors, .count = static_cast<std::int64_t>(descriptors.size())};
  given.descriptors = std::move(descriptors);
  return given;
}

CudnnDescriptor part_of(const CudnnDescriptor& whole, Kind kind) {
  CudnnDescriptor part;
  part.type = kind, part.finalized = true;
  part.problem = whole.problem, part.config = whole.config, part.attention = whole.attention;
  part.handle = whole.handle, part.refers_to = whole.refers_to;
  return part;
}

std::vector<CudnnDescriptor> results_of(const CudnnDescriptor& heuristics) {
  std::vector<CudnnDescriptor> found;
  for (const CudnnConfig& config : heuristics.results)
    found.emplace_back(part_of(heuristics, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)).config = config;
  return found;
}

std::vector<CudnnDescriptor> knobs_of(const CudnnDescriptor& d) {
  if (!engine_of(d).has_tiles) return {};
  return {part_of(d, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)};
}

/// By the attribute alone: its name tells of what it is.
std::optional<Answer> read_attribute(const CudnnDescriptor& d, Name name) {
  switch (name) {
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      return answer(CUDNN_TYPE_INT64,
                    std::vector{static_cast<std::int64_t>(engines_behind(d).size())});
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      return answer(results_of(d));
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      return answer({part_of(d, CUDNN_BACKEND_ENGINE_DESCRIPTOR)});
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
      return answer(knobs_of(d));
    case CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE:
      return answer(CUDNN_TYPE_KNOB_TYPE, std::vector{CUDNN_KNOB_TYPE_TILE_SIZE});
    case CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE:
      return answer(CUDNN_TYPE_INT64, std::vector{d.config.tile});
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      return answer(CUDNN_TYPE_INT64, std::vector{d.config.engine});
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      return answer(CUDNN_TYPE_NUMERICAL_NOTE, engine_of(d).notes);
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      return answer(CUDNN_TYPE_INT64, std::vector{static_cast<std::int64_t>(workspace_of(d))});
    default:
      return {};
  }
}

/// Attributes are numbered by the descriptor that has them.
bool has_attribute(Kind kind, Name name) {
  const std::map<Kind, int> hundreds{
      {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, 2},     {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 3},
      {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, 4}, {CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, 6},
      {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, 8}, {CUDNN_BACKEND_ENGINE_DESCRIPTOR, 13}};
  const auto found = hundreds.find(kind);
  return found != hundreds.end() && static_cast<int>(name) / 100 == found->second;
}

}  // namespace

std::size_t workspace_of(const CudnnDescriptor& plan) {
  return plan.attention ? workspace_of(*plan.attention, plan.config)
                        : workspace_of(plan.problem, plan.config);
}

const char* finalize_name(Kind kind) {
  return known().at(kind).finalize_name;
}

bool is_known(Kind kind) {
  return known().contains(kind);
}

cudnnStatus_t set_attribute(CudnnDescriptor& d, Name name, Type type, std::int64_t count,
                            const void* values) {
  const Rule* const rule = rule_of(d, name);
  if (rule == nullptr || d.finalized || values == nullptr) return CUDNN_STATUS_BAD_PARAM;
  if (type != rule->type) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
  if (count < 1 || count > rule->most) return CUDNN_STATUS_BAD_PARAM;
  const std::size_t bytes = static_cast<std::size_t>(count) * bytes_of(type);
  CudnnAttribute attribute{type, count, std::vector<char>(bytes)};
  std::memcpy(attribute.bytes.data(), values, bytes);
  if (type == CUDNN_TYPE_HANDLE) d.handle = *static_cast<const cudnnHandle_t*>(values);
  if (type == kDescriptors) {
    for (std::int64_t i = 0; i < count; ++i) {
      auto* const other = static_cast<CudnnDescriptor* const*>(values)[i];
      if (!rule->kinds.contains(other->type)) return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
      if (!other->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
      d.refers_to.push_back(other);
      if (d.handle == nullptr) d.handle = other->handle;
    }
  }
  d.attributes[name] = std::move(attribute);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize(CudnnDescriptor& d, int capability) {
  if (d.finalized) return CUDNN_STATUS_BAD_PARAM;
  for (const Rule& rule : known().at(d.type).rules) {
    if (rule.required && !d.attributes.contains(rule.name)) return CUDNN_STATUS_BAD_PARAM;
  }
  inherit(d);
  const cudnnStatus_t status = finalize_kind(d, capability);
  d.finalized = status == CUDNN_STATUS_SUCCESS;
  return status;
}

cudnnStatus_t get_attribute(const CudnnDescriptor& d, Name name, Type type, std::int64_t most,
                            std::int64_t* count, void* values) {
  if (!d.finalized) return CUDNN_STATUS_NOT_INITIALIZED;
  if (!has_attribute(d.type, name)) return CUDNN_STATUS_BAD_PARAM;
  const std::optional<Answer> given = read_attribute(d, name);
  if (!given || count == nullptr) return CUDNN_STATUS_BAD_PARAM;
  if (type != given->type) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
  *count = given->count;
  if (most == 0) return CUDNN_STATUS_SUCCESS;
  *count = std::min(most, given->count);
  if (values == nullptr) return CUDNN_STATUS_BAD_PARAM;
  if (type != kDescriptors)
    std::memcpy(values, given->bytes.data(), static_cast<std::size_t>(*count) * bytes_of(type));
  for (std::int64_t i = 0; type == kDescriptors && i < *count; ++i) {
    CudnnDescriptor& target = *static_cast<CudnnDescriptor**>(values)[i];
    const CudnnDescriptor& from = given->descriptors[static_cast<std::size_t>(i)];
    if (target.type != from.type) return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
    target = from;
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace cairn::gpusim
