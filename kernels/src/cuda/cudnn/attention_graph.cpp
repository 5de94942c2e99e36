#include "cuda/cudnn/attention_graph.h"

#include <utility>

namespace cairn::kernels::cuda {
namespace {

using GraphRef = const Descriptor&;  // a tensor

Sizes4 packed_strides(const Sizes4& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

/// Of a matrix's transpose.
Sizes4 swapped(const Sizes4& sizes) {
  return {sizes[0], sizes[1], sizes[3], sizes[2]};
}

/// What a pointwise operation has besides its input and result.
struct PointwiseExtras {
  const Descriptor* other = nullptr;
  const Descriptor* choice = nullptr;  // of BINARY_SELECT
  cudnnDataType_t precision = CUDNN_DATA_FLOAT;
  std::int64_t axis = -1;
};

/// Adds operations to the graph; each returns the tensor that it writes.
class SdpaOperations {
 public:
  SdpaOperations(OperationGraph& graph, const SdpaShape& shape) : graph_(graph), shape_(shape) {}

  GraphRef queries(std::int64_t id, const HeadStrides& strides) {
    return given(id, {shape_.batch, shape_.heads, shape_.queries, shape_.columns}, strides);
  }
  GraphRef keys(std::int64_t id, const HeadStrides& strides) {
    return given(id, {shape_.batch, shape_.key_heads, shape_.keys, shape_.columns}, strides);
  }
  GraphRef keys_transposed(std::int64_t id, const HeadStrides& by) {
    return graph_.tensor({.id = id,
                          .type = cudnn_type(shape_.dtype),
                          .sizes = {shape_.batch, shape_.key_heads, shape_.columns, shape_.keys},
                          .strides = {by.batch, by.head, 1, by.row}});
  }
  /// [B, H, T, 1] f32.
  GraphRef row_numbers(std::int64_t id) {
    return graph_.tensor({.id = id, .sizes = rows(), .strides = packed_strides(rows())});
  }
  GraphRef number(std::int64_t id, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return graph_.tensor({.id = id,
                          .type = type,
                          .sizes = {1, 1, 1, 1},
                          .strides = {1, 1, 1, 1},
                          .is_by_value = true});
  }

  // Tensors inside the graph.
  GraphRef scores(cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    const Sizes4 sizes{shape_.batch, shape_.heads, shape_.queries, shape_.keys};
    return inner(sizes, packed_strides(sizes), type);
  }
  GraphRef row() { return inner(rows(), packed_strides(rows()), CUDNN_DATA_FLOAT); }
  /// Of every head of queries.
  GraphRef heads_of(std::int64_t length, cudnnDataType_t type) {
    const Sizes4 sizes{shape_.batch, shape_.heads, length, shape_.columns};
    return inner(sizes, packed_strides(sizes), type);
  }

  GraphRef matmul(GraphRef a, GraphRef b, GraphRef y) {
    Descriptor how(graph_.op(), CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    how.finalize();
    Descriptor operation(graph_.op(), CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, y);
    operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, graph_.keep(std::move(how)));
    graph_.add(std::move(operation));
    return y;
  }
  GraphRef pointwise(cudnnPointwiseMode_t mode, GraphRef x, GraphRef y,
                     const PointwiseExtras& extras = {}) {
    Descriptor how(graph_.op(), CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, mode);
    how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, extras.precision);
    if (extras.axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, extras.axis);
    how.finalize();
    Descriptor operation(graph_.op(), CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, graph_.keep(std::move(how)));
    operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    if (extras.other) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *extras.other);
    if (extras.choice) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *extras.choice);
    graph_.add(std::move(operation));
    return y;
  }
  GraphRef combine(cudnnPointwiseMode_t mode, GraphRef x, GraphRef other, GraphRef y) {
    return pointwise(mode, x, y, {.other = &other});
  }
  GraphRef reduce(cudnnReduceTensorOp_t operator_, GraphRef x, GraphRef y) {
    Descriptor how(graph_.op(), CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    how.set(CUDNN_ATTR_REDUCTION_OPERATOR, operator_);
    how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    how.finalize();
    Descriptor operation(graph_.op(), CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, graph_.keep(std::move(how)));
    graph_.add(std::move(operation));
    return y;
  }
  GraphRef reshape(GraphRef x, GraphRef y) {
    Descriptor operation(graph_.op(), CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    graph_.add(std::move(operation));
    return y;
  }

  /// scale q k^T.
  GraphRef scaled_scores(GraphRef q, GraphRef k_transposed, GraphRef scale) {
    return combine(CUDNN_POINTWISE_MUL, matmul(q, k_transposed, scores()), scale, scores());
  }
  /// With -inf where a query does not see a key, if any does not.
  GraphRef hidden(GraphRef x) {
    if (!shape_.causal) return x;
    const auto index = [&](std::int64_t axis) -> GraphRef {
      return pointwise(CUDNN_POINTWISE_GEN_INDEX, x, scores(CUDNN_DATA_INT32), {.axis = axis});
    };
    const Descriptor* last = &index(2);
    GraphRef key = index(3);
    if (shape_.queries != shape_.keys) {
      last = &shifted(CUDNN_POINTWISE_ADD, *last, number(kSdpaKeys, CUDNN_DATA_INT32));
      last = &shifted(CUDNN_POINTWISE_SUB, *last, number(kSdpaQueries, CUDNN_DATA_INT32));
    }
    GraphRef seen = pointwise(CUDNN_POINTWISE_CMP_GE, *last, scores(CUDNN_DATA_BOOLEAN),
                              {.other = &key, .precision = CUDNN_DATA_BOOLEAN});
    return pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, scores(),
                     {.other = &number(kSdpaHidden), .choice = &seen});
  }
  /// [B, H, S, T] halves of x [B, H, T, S].
  GraphRef transposed(GraphRef x) {
    const Sizes4 sizes{shape_.batch, shape_.heads, shape_.queries, shape_.keys};
    return reshape(x, inner(swapped(sizes), swapped(packed_strides(sizes)), half()));
  }
  /// weights^T x, summed over the heads of queries that share one of keys. Each head's is of
  /// halves: cuDNN keeps them as such, and gives rubbish where the graph says f32.
  void sum_queries(GraphRef weights, GraphRef x, GraphRef y) {
    if (shape_.heads == shape_.key_heads) {
      matmul(transposed(weights), x, y);
    } else {
      reduce(CUDNN_REDUCE_TENSOR_ADD, matmul(transposed(weights), x, heads_of(shape_.keys, half())),
             y);
    }
  }
  /// k, which was given transposed.
  GraphRef keys_back(GraphRef k_transposed, const HeadStrides& by) {
    return reshape(k_transposed,
                   inner({shape_.batch, shape_.key_heads, shape_.keys, shape_.columns},
                         {by.batch, by.head, by.row, 1}, half()));
  }

  cudnnDataType_t half() const { return cudnn_type(shape_.dtype); }

 private:
  GraphRef given(std::int64_t id, const Sizes4& sizes, const HeadStrides& by) {
    return graph_.tensor({.id = id,
                          .type = cudnn_type(shape_.dtype),
                          .sizes = sizes,
                          .strides = {by.batch, by.head, by.row, 1}});
  }
  GraphRef inner(const Sizes4& sizes, const Sizes4& strides, cudnnDataType_t type) {
    return graph_.tensor(
        {.id = next_id_++, .type = type, .sizes = sizes, .strides = strides, .is_virtual = true});
  }
  GraphRef shifted(cudnnPointwiseMode_t mode, GraphRef index, GraphRef by) {
    return pointwise(mode, index, scores(CUDNN_DATA_INT32),
                     {.other = &by, .precision = CUDNN_DATA_INT32, .axis = 3});
  }
  Sizes4 rows() const { return {shape_.batch, shape_.heads, shape_.queries, 1}; }

  OperationGraph& graph_;
  const SdpaShape& shape_;
  std::int64_t next_id_ = 1000;  // past those of SdpaTensor
};

void add_forward(SdpaOperations& ops, const SdpaShape& shape) {
  GraphRef scores = ops.hidden(ops.scaled_scores(
      ops.queries(kSdpaQ, shape.q), ops.keys_transposed(kSdpaK, shape.k), ops.number(kSdpaScale)));
  GraphRef top = ops.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, ops.row());
  GraphRef below = ops.combine(CUDNN_POINTWISE_SUB, scores, top, ops.scores());
  GraphRef powers = ops.pointwise(CUDNN_POINTWISE_EXP, below, ops.scores());
  GraphRef sum = ops.reduce(CUDNN_REDUCE_TENSOR_ADD, powers, ops.row());
  GraphRef log_sum = ops.pointwise(CUDNN_POINTWISE_LOG, sum, ops.row());
  ops.combine(CUDNN_POINTWISE_ADD, top, log_sum, ops.row_numbers(kSdpaLse));
  GraphRef weights = ops.combine(CUDNN_POINTWISE_DIV, powers, sum, ops.scores(ops.half()));
  ops.matmul(weights, ops.keys(kSdpaV, shape.v), ops.queries(kSdpaY, shape.y));
}

void add_backward(SdpaOperations& ops, const SdpaShape& shape) {
  GraphRef q = ops.queries(kSdpaQ, shape.q), dy = ops.queries(kSdpaDy, shape.dy);
  GraphRef k = ops.keys_transposed(kSdpaK, shape.k), v = ops.keys_transposed(kSdpaV, shape.v);
  GraphRef scale = ops.number(kSdpaScale);
  GraphRef along = ops.combine(CUDNN_POINTWISE_MUL, dy, ops.queries(kSdpaY, shape.y),
                               ops.heads_of(shape.queries, CUDNN_DATA_FLOAT));
  GraphRef delta =
      ops.combine(CUDNN_POINTWISE_MUL, ops.reduce(CUDNN_REDUCE_TENSOR_ADD, along, ops.row()),
                  ops.number(kSdpaOne), ops.row_numbers(kSdpaDelta));
  GraphRef below = ops.combine(CUDNN_POINTWISE_SUB, ops.scaled_scores(q, k, scale),
                               ops.row_numbers(kSdpaLse), ops.scores());
  GraphRef weights = ops.pointwise(CUDNN_POINTWISE_EXP, ops.hidden(below), ops.scores());
  ops.sum_queries(weights, dy, ops.keys(kSdpaDv, shape.dv));
  GraphRef gradient =
      ops.combine(CUDNN_POINTWISE_SUB, ops.matmul(dy, v, ops.scores()), delta, ops.scores());
  GraphRef weighted = ops.combine(CUDNN_POINTWISE_MUL, gradient, weights, ops.scores());
  GraphRef dscores = ops.combine(CUDNN_POINTWISE_MUL, weighted, scale, ops.scores());
  ops.sum_queries(dscores, q, ops.keys(kSdpaDk, shape.dk));
  ops.matmul(dscores, ops.keys_back(k, shape.k), ops.queries(kSdpaDq, shape.dq));
}

}  // namespace

OperationGraph sdpa_graph(const Queue& queue, const CudnnHandle& handle, const SdpaShape& shape) {
  OperationGraph graph(queue.op());
  SdpaOperations operations(graph, shape);
  if (shape.backward) {
    add_backward(operations, shape);
  } else {
    add_forward(operations, shape);
  }
  graph.finish(handle);
  return graph;
}

}  // namespace cairn::kernels::cuda
