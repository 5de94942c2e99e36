#include "gpu/sim/cudnn_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <regex>
#include <set>

namespace cairn::gpusim {
namespace {

using Kind = CudnnOperation::Kind;
using Sizes = std::array<std::int64_t, 4>;

// The engines' indices.
constexpr std::int64_t kUnbuiltFusion = 0;  // proposed, and never supported
constexpr std::int64_t kLowFusion = 1;      // weights of few bits
constexpr std::int64_t kGreedyFusion = 2;   // wants more workspace than anybody gives
constexpr std::int64_t kFlash = 3;
constexpr std::int64_t kPlainFusion = 4;  // forward alone

char letter_of(const CudnnOperation& operation) {
  if (operation.kind == Kind::matmul) return 'M';
  if (operation.kind == Kind::reshape) return 'r';
  if (operation.kind == Kind::reduction)
    return operation.mode == CUDNN_REDUCE_TENSOR_MAX   ? 'X'
           : operation.mode == CUDNN_REDUCE_TENSOR_ADD ? 'A'
                                                       : '.';
  static const auto& letters = *new std::map<int, char>{
      {CUDNN_POINTWISE_ADD, '+'},       {CUDNN_POINTWISE_SUB, '-'},
      {CUDNN_POINTWISE_MUL, '*'},       {CUDNN_POINTWISE_DIV, '/'},
      {CUDNN_POINTWISE_EXP, 'e'},       {CUDNN_POINTWISE_LOG, 'l'},
      {CUDNN_POINTWISE_GEN_INDEX, 'g'}, {CUDNN_POINTWISE_CMP_GE, '>'},
      {CUDNN_POINTWISE_IDENTITY, '='},  {CUDNN_POINTWISE_BINARY_SELECT, '?'}};
  const auto found = letters.find(operation.mode);
  return found == letters.end() ? '.' : found->second;
}

/// The nth matrix product.
const CudnnOperation& product(const CudnnAttention& graph, std::size_t n) {
  for (const CudnnOperation& operation : graph.operations) {
    if (operation.kind == Kind::matmul && n-- == 0) return operation;
  }
  report("cudnn contract", "an attention that lacks a product");
}

bool is_half(const CudnnTensor& tensor) {
  return tensor.type == CUDNN_DATA_HALF || tensor.type == CUDNN_DATA_BFLOAT16;
}

/// What the graph's shape is: of its first product of queries with keys.
struct Extents {
  std::int64_t batch, heads, key_heads, queries, keys, columns;

  explicit Extents(const CudnnAttention& graph) {
    const CudnnOperation& scores = product(graph, 0);
    const Sizes &q = scores.inputs[0].sizes, &k = scores.inputs[1].sizes;
    batch = q[0], heads = q[1], key_heads = k[1], queries = q[2], keys = k[3], columns = q[3];
  }
};

std::int64_t up_to(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

/// The row-major place in `sizes` of an element of a tensor that it is spread over: sizes that are
/// parts of the tensor's.
class Spread {
 public:
  Spread(const Sizes& from, const Sizes& sizes) {
    std::int64_t next = 1;
    for (std::size_t d = 4; d-- > 0; next *= sizes[d]) {
      strides_[d] = next;
      parts_[d] = from[d] / sizes[d];
    }
  }
  std::size_t operator()(const Sizes& at) const {
    std::int64_t index = 0;
    for (std::size_t d = 0; d < 4; ++d) index += at[d] / parts_[d] * strides_[d];
    return static_cast<std::size_t>(index);
  }

 private:
  Sizes strides_{}, parts_{};
};

/// Whether each size is a whole multiple of the other's.
bool spreads(const Sizes& from, const Sizes& sizes) {
  for (std::size_t d = 0; d < 4; ++d) {
    if (sizes[d] < 1 || from[d] % sizes[d] != 0) return false;
  }
  return true;
}

/// Calls each(position, row-major index).
template <class Each>
void for_positions(const Sizes& sizes, Each each) {
  std::size_t index = 0;
  Sizes at{};
  for (at[0] = 0; at[0] < sizes[0]; ++at[0]) {
    for (at[1] = 0; at[1] < sizes[1]; ++at[1]) {
      for (at[2] = 0; at[2] < sizes[2]; ++at[2]) {
        for (at[3] = 0; at[3] < sizes[3]; ++at[3]) each(at, index++);
      }
    }
  }
}

double rounded_to(const CudnnTensor& tensor, double value) {
  if (!is_half(tensor)) return value;
  char bytes[8];
  store(tensor.element(), bytes, value);
  return load(tensor.element(), bytes);
}

/// Values of the graph's tensors while it runs.
class Interpreter {
 public:
  Interpreter(const std::map<std::int64_t, void*>& data,
              const std::map<std::int64_t, double>& numbers, bool low)
      : data_(data), numbers_(numbers), low_(low) {}

  void run(const CudnnOperation& operation) {
    switch (operation.kind) {
      case Kind::matmul:
        return write_values(operation.y, multiplied(operation));
      case Kind::pointwise:
        return write_values(operation.y, each_point(operation));
      case Kind::reduction:
        return write_values(operation.y, reduced(operation));
      case Kind::reshape:
        return write_values(operation.y, reshaped(operation));
    }
  }

 private:
  const CudnnValues& values(const CudnnTensor& tensor) {
    const auto found = values_.find(tensor.id);
    if (found != values_.end()) return found->second;
    CudnnValues& made = values_[tensor.id];
    made = tensor.is_by_value ? CudnnValues{numbers_.at(tensor.id)}
                              : load_tensor(tensor, data_.at(tensor.id));
    return made;
  }
  void write_values(const CudnnTensor& tensor, CudnnValues result) {
    for (double& value : result) value = rounded_to(tensor, value);
    if (!tensor.is_virtual) store_tensor(tensor, data_.at(tensor.id), result);
    values_[tensor.id] = std::move(result);
  }

  CudnnValues multiplied(const CudnnOperation& operation) {
    const CudnnTensor &a = operation.inputs[0], &b = operation.inputs[1], &y = operation.y;
    const CudnnValues &left = values(a), &right = values(b);
    const std::int64_t M = a.sizes[2], K = a.sizes[3], N = b.sizes[3];
    CudnnValues sums(y.count());
    for_positions(y.sizes, [&](const Sizes& at, std::size_t index) {
      const std::int64_t head = at[0] * a.sizes[1] + at[1];
      const std::int64_t other = head / (a.sizes[1] / b.sizes[1]);
      for (std::int64_t k = 0; k < K; ++k) {
        sums[index] += left[static_cast<std::size_t>((head * M + at[2]) * K + k)] *
                       right[static_cast<std::size_t>((other * K + k) * N + at[3])];
      }
    });
    return sums;
  }

  CudnnValues each_point(const CudnnOperation& operation) {
    const CudnnTensor& y = operation.y;
    std::vector<const CudnnValues*> inputs;
    std::vector<Spread> places;
    for (const CudnnTensor& input : operation.inputs) {
      if (operation.mode != CUDNN_POINTWISE_GEN_INDEX) inputs.push_back(&values(input));
      places.emplace_back(y.sizes, input.sizes);
    }
    CudnnValues result(y.count());
    for_positions(y.sizes, [&](const Sizes& at, std::size_t index) {
      const auto input = [&](std::size_t n) { return (*inputs.at(n))[places.at(n)(at)]; };
      result[index] = point(operation, at, input);
    });
    return result;
  }
  template <class Input>
  double point(const CudnnOperation& operation, const Sizes& at, Input input) const {
    switch (operation.mode) {
      case CUDNN_POINTWISE_ADD:
        return input(0) + input(1);
      case CUDNN_POINTWISE_SUB:
        return input(0) - input(1);
      case CUDNN_POINTWISE_MUL:
        return input(0) * input(1);
      case CUDNN_POINTWISE_DIV:
        return input(0) / input(1);
      case CUDNN_POINTWISE_EXP:
        return low_ ? std::nearbyint(std::exp(input(0)) * 64) / 64 : std::exp(input(0));
      case CUDNN_POINTWISE_LOG:
        return std::log(input(0));
      case CUDNN_POINTWISE_GEN_INDEX:
        return static_cast<double>(at[static_cast<std::size_t>(operation.axis)]);
      case CUDNN_POINTWISE_CMP_GE:
        return input(0) >= input(1) ? 1.0 : 0.0;
      case CUDNN_POINTWISE_BINARY_SELECT:
        return input(2) != 0.0 ? input(0) : input(1);
      default:
        return input(0);
    }
  }

  CudnnValues reduced(const CudnnOperation& operation) {
    const CudnnTensor& x = operation.inputs[0];
    const CudnnValues& from = values(x);
    const bool adds = operation.mode == CUDNN_REDUCE_TENSOR_ADD;
    const Spread place(x.sizes, operation.y.sizes);
    CudnnValues result(operation.y.count(), adds ? 0.0 : -std::numeric_limits<double>::infinity());
    for_positions(x.sizes, [&](const Sizes& at, std::size_t index) {
      double& value = result[place(at)];
      value = adds ? value + from[index] : std::max(value, from[index]);
    });
    return result;
  }

  /// The same memory by other strides.
  CudnnValues reshaped(const CudnnOperation& operation) {
    const auto place = [](const CudnnTensor& tensor, const Sizes& at) {
      std::int64_t offset = 0;
      for (std::size_t d = 0; d < 4; ++d) offset += at[d] * tensor.strides[d];
      return static_cast<std::size_t>(offset);
    };
    const CudnnTensor& x = operation.inputs[0];
    const CudnnValues& from = values(x);
    const Sizes last{x.sizes[0] - 1, x.sizes[1] - 1, x.sizes[2] - 1, x.sizes[3] - 1};
    CudnnValues memory(place(x, last) + 1);
    for_positions(x.sizes,
                  [&](const Sizes& at, std::size_t index) { memory[place(x, at)] = from[index]; });
    CudnnValues result(operation.y.count());
    for_positions(operation.y.sizes, [&](const Sizes& at, std::size_t index) {
      result[index] = memory.at(place(operation.y, at));
    });
    return result;
  }

  const std::map<std::int64_t, void*>& data_;
  const std::map<std::int64_t, double>& numbers_;
  bool low_;
  std::map<std::int64_t, CudnnValues> values_;
};

bool has_fitting_sizes(const CudnnOperation& operation) {
  const Sizes &x = operation.inputs[0].sizes, &y = operation.y.sizes;
  switch (operation.kind) {
    case Kind::matmul: {
      const Sizes& b = operation.inputs[1].sizes;
      return x[3] == b[2] && x[0] == b[0] && x[1] % b[1] == 0 && y == Sizes{x[0], x[1], x[2], b[3]};
    }
    case Kind::pointwise:
      return std::all_of(operation.inputs.begin(), operation.inputs.end(),
                         [&](const CudnnTensor& input) { return spreads(y, input.sizes); });
    case Kind::reduction:
      return spreads(x, y);
    case Kind::reshape:
      return operation.inputs[0].count() == operation.y.count();
  }
  return false;
}

/// Where a mask by rows and columns is bottom-right: it says how many of each there are.
bool has_lower_diagonal(const CudnnAttention& graph) {
  return graph.text().find("gg+-") != std::string::npos;
}

/// By NVIDIA's documents and the checks of its cudnn-frontend.
cudnnStatus_t check_extents(const CudnnAttention& graph) {
  const Extents extents(graph);
  const int major = graph.capability / 10;
  if (major < 8) return CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH;
  const std::int64_t most = graph.is_forward() || major == 9 ? 256 : 128;
  if (extents.columns % 8 != 0 || extents.columns > most) return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;
  if (has_lower_diagonal(graph) && extents.queries > extents.keys) {
    report("cudnn contract",
           "expected a bottom-right causal mask of no more queries than keys, got " +
               std::to_string(extents.queries) + " and " + std::to_string(extents.keys) +
               ", which the documents refuse and the library takes");
  }
  return CUDNN_STATUS_SUCCESS;
}

/// Operands of the products lie as cuDNN wants them.
cudnnStatus_t check_operands(const CudnnAttention& graph) {
  const cudnnDataType_t type = product(graph, 0).inputs[0].type;
  for (const CudnnTensor& tensor : graph.arguments()) {
    if (tensor.is_by_value) continue;
    if (tensor.type == CUDNN_DATA_FLOAT) {  // lse and delta
      if (!tensor.is_packed(false)) return CUDNN_STATUS_NOT_SUPPORTED_LAYOUT;
      continue;
    }
    if (tensor.type != type || !is_half(tensor)) return CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE;
    const bool columns = tensor.strides[3] == 1 || tensor.strides[2] == 1;
    if (!columns) return CUDNN_STATUS_NOT_SUPPORTED_LAYOUT;
    for (const std::int64_t stride : tensor.strides) {
      if (stride != 1 && stride % 8 != 0) return CUDNN_STATUS_NOT_SUPPORTED_LAYOUT;
    }
    if (tensor.alignment < 16) return CUDNN_STATUS_NOT_SUPPORTED_LAYOUT;
  }
  return CUDNN_STATUS_SUCCESS;
}

/// The weights meet the values in the operands' type.
bool has_half_weights(const CudnnAttention& graph) {
  return is_half(product(graph, 1).inputs[0]);
}

/// What is summed over heads is kept in the operands' type, whatever the graph says (seen on an
/// H200, cuDNN 9.19: no error, and rubbish in dk and dv).
void check_sums_of_heads(const CudnnAttention& graph) {
  for (const CudnnOperation& operation : graph.operations) {
    const bool sums =
        operation.kind == Kind::reduction && operation.inputs[0].sizes[1] > operation.y.sizes[1];
    if (sums && !is_half(operation.inputs[0])) {
      report("cudnn contract",
             "expected gradients that are summed over heads in the operands' type, got f32, which "
             "the library takes and reads as halves");
    }
  }
}

}  // namespace

bool CudnnAttention::is_consistent() const {
  std::set<std::int64_t> written;
  for (const CudnnOperation& operation : operations) {
    for (const CudnnTensor& input : operation.inputs) {
      if (input.is_virtual && !written.contains(input.id)) return false;
    }
    if (!written.insert(operation.y.id).second || !has_fitting_sizes(operation)) return false;
  }
  return true;
}

std::string CudnnAttention::text() const {
  std::string letters;
  for (const CudnnOperation& operation : operations) letters += letter_of(operation);
  return letters;
}

bool CudnnAttention::is_forward() const {
  static const auto& form = *new std::regex(R"(M\*(gg(\+-)?>\?)?X-eAl\+/M)");
  return std::regex_match(text(), form);
}

bool CudnnAttention::is_backward() const {
  static const auto& form = *new std::regex(R"(\*A\*M\*-(gg(\+-)?>\?)?erMA?M-\*\*rMA?rM)");
  return std::regex_match(text(), form);
}

std::vector<CudnnTensor> CudnnAttention::arguments() const {
  std::map<std::int64_t, CudnnTensor> found;
  for (const CudnnOperation& operation : operations) {
    for (const CudnnTensor& input : operation.inputs) found[input.id] = input;
    found[operation.y.id] = operation.y;
  }
  std::vector<CudnnTensor> all;
  for (const auto& [id, tensor] : found) {
    if (!tensor.is_virtual) all.push_back(tensor);
  }
  return all;
}

std::vector<CudnnEngine> engines_of(const CudnnAttention&) {
  return {
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, false},
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION}, false},
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, false},
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, true},
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, false}};
}

std::vector<CudnnConfig> proposals(const CudnnAttention& graph, cudnnBackendHeurMode_t mode) {
  if (!graph.is_forward() && !graph.is_backward()) return {};
  if (check_support(graph, {kFlash, 0}) != CUDNN_STATUS_SUCCESS) return {};
  if (mode == CUDNN_HEUR_MODE_FALLBACK)
    return graph.is_forward() ? std::vector<CudnnConfig>{{kPlainFusion, 0}}
                              : std::vector<CudnnConfig>{};
  if (mode == CUDNN_HEUR_MODE_B) return {{kFlash, 3}, {kFlash, 1}};
  return {{kUnbuiltFusion, 0}, {kLowFusion, 0}, {kGreedyFusion, 0}, {kFlash, 2}, {kFlash, 1}};
}

cudnnStatus_t check_support(const CudnnAttention& graph, const CudnnConfig& config) {
  const bool forward = graph.is_forward();
  if (!forward && !graph.is_backward()) return CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN;
  if (const cudnnStatus_t status = check_extents(graph)) return status;
  if (const cudnnStatus_t status = check_operands(graph)) return status;
  if (!has_half_weights(graph)) return CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE;
  check_sums_of_heads(graph);
  const bool refused =
      config.engine == kUnbuiltFusion || (config.engine == kPlainFusion && !forward);
  return refused ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS;
}

std::size_t workspace_of(const CudnnAttention& graph, const CudnnConfig& config) {
  if (config.engine == kPlainFusion) return 0;
  if (config.engine == kGreedyFusion) return std::size_t{1} << 40;
  if (graph.is_forward()) return 256;
  const Extents e(graph);
  std::int64_t bytes = 256 + e.batch * e.heads * up_to(e.queries, 64) * up_to(e.keys, 128) * 2;
  if (e.heads != e.key_heads) bytes += 2 * e.batch * e.heads * e.keys * e.columns * 2;
  return static_cast<std::size_t>(bytes);
}

void run_attention(const CudnnAttention& graph, const CudnnConfig& config,
                   const std::map<std::int64_t, void*>& data,
                   const std::map<std::int64_t, double>& numbers) {
  Interpreter interpreter(data, numbers, config.engine == kLowFusion);
  for (const CudnnOperation& operation : graph.operations) interpreter.run(operation);
}

}  // namespace cairn::gpusim
