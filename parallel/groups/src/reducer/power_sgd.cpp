#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/matmul.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/parallel/communication_hook.h"
#include "cairn/parallel/flatten.h"
#include "reducer/memory_view.h"

namespace cairn::parallel {
namespace {

// Squared norms of rows: under the first one a row counts as zero, under the second one, beside
// what it was before a projection, as rounding.
constexpr double kSmallestSquare = 1e-30;
constexpr double kRoundingSquare = 1e-10;

/// Flat f32 memory for the parts of many gradients, which travel as one.
class Parts {
 public:
  Parts(const std::vector<Shape>& shapes, Device device) {
    std::int64_t elements = 0;
    for (const Shape& shape : shapes) elements += shape.numel();
    flat_ = Tensor::empty({elements}, DType::f32, device);
    std::int64_t offset = 0;
    for (const Shape& shape : shapes) {
      parts_.push_back(flat_.view().slice(0, offset, offset + shape.numel()).reshape(shape));
      offset += shape.numel();
    }
  }
  const TensorView& operator[](std::size_t i) const { return parts_[i]; }
  void average(const ProcessGroup& group, const std::string& name) const {
    group.all_reduce(flat_, ReduceOp::mean, name);
  }
  kernels::PendingCheck check() const { return kernels::check_tensors({flat_}); }

 private:
  Tensor flat_;
  std::vector<TensorView> parts_;
};

Tensor squared_norm(const TensorView& row) {
  const Tensor square = Tensor::empty(row.shape, DType::f32, row.device);
  Tensor norm = Tensor::empty({1, 1}, DType::f32, row.device);
  kernels::unary(kernels::UnaryOp::square, row, square);
  kernels::reduce(kernels::ReductionKind::sum, square, norm);
  return norm;
}

void project_out(const TensorView& row, const TensorView& before) {
  const Tensor along = Tensor::empty({1, before.size(0)}, DType::f32, row.device);
  kernels::matmul(row, before.transpose(0, 1), along);
  kernels::matmul(along, before, row, {.alpha = -1.0, .accumulate = true});
}

/// 1 where `norm` is worth something beside `former`, else 0: what is left is rounding.
Tensor is_significant(const Tensor& norm, const Tensor& former) {
  Tensor least = Tensor::empty({1, 1}, DType::f32, norm.device());
  const Tensor answer = Tensor::empty({1, 1}, DType::boolean, norm.device());
  kernels::affine(former, kRoundingSquare, kSmallestSquare, least);
  kernels::binary(kernels::BinaryOp::ge, norm, least, answer);
  kernels::copy(answer, least);
  return least;
}

/// Makes rows orthonormal (Gram-Schmidt, twice each); a row that those before it make up becomes 0.
void orthogonalize(const TensorView& rows) {
  for (std::int64_t k = 0; k < rows.size(0); ++k) {
    const TensorView row = rows.slice(0, k, k + 1);
    for (int time = 0; time < 2; ++time) {
      const Tensor former = squared_norm(row);
      if (k > 0) project_out(row, rows.slice(0, 0, k));
      const Tensor norm = squared_norm(row);
      const Tensor significant = is_significant(norm, former);
      kernels::affine(norm, 1.0, kSmallestSquare, norm);
      kernels::unary(kernels::UnaryOp::rsqrt, norm, norm);
      kernels::binary(kernels::BinaryOp::mul, norm, significant, norm);
      kernels::binary(kernels::BinaryOp::mul, row, norm, row);
    }
  }
}

class PowerSgd final : public CommunicationHook {
 public:
  explicit PowerSgd(const PowerSgdOptions& options) : options_(options) {}

  void reduce(const GradientBucket& bucket, const ProcessGroup& group) override {
    if (bucket.pass < options_.start_step)
      return group.all_reduce(bucket.data, ReduceOp::mean, bucket.name);
    std::vector<Compressed> matrices;
    std::vector<TensorView> exact;
    for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
      if (compresses(bucket.gradients[i])) {
        matrices.push_back(begin(bucket.names[i], bucket.gradients[i], bucket.pass));
      } else {
        exact.push_back(bucket.gradients[i]);
      }
    }
    if (!exact.empty()) average(exact, group, bucket.name + " (exact)");
    if (!matrices.empty()) approximate(matrices, group, bucket);
  }

  std::string describe() const override {
    const PowerSgdOptions& o = options_;
    return core::str("power_sgd(rank ", o.rank, ", start_step ", o.start_step,
                     ", min_compression_rate ", o.min_compression_rate, ", error_feedback ",
                     o.error_feedback ? "true" : "false", ", warm_start ",
                     o.warm_start ? "true" : "false", ", seed ", o.seed, ")");
  }

  StateDict state_dict(bool of_this_rank) const override {
    StateDict state;
    std::int64_t number = 0;
    for (const auto& [name, memory] : memories_) {
      if (!memory.finite()) continue;
      StateDict& entry = state.make_dict(std::to_string(number++));
      entry.set("name", name);
      entry.set("q", memory.q);
      if (of_this_rank && memory.error.defined()) entry.set("error", memory.error);
    }
    return state;
  }

  void load_state_dict(const StateDict& state) override {
    std::map<std::string, Memory> loaded;
    for (const auto& [key, value] : state) {
      const StateDict& entry = state.dict(key);
      Memory& memory = loaded[entry.text("name")];
      memory.q = copy_of(entry.tensor("q"));
      if (entry.contains("error")) memory.error = copy_of(entry.tensor("error"));
    }
    memories_ = std::move(loaded);
  }

 private:
  struct Memory {
    Tensor q;      // transposed, [rank, n], the same on every rank
    Tensor error;  // [m, n], this rank's
    kernels::PendingCheck q_check;

    /// The same answer on every rank. Waits for the last pass.
    bool finite() const {
      for (const kernels::TensorCheck& check : q_check.read()) {
        if (check.nonfinite > 0) return false;
      }
      return true;
    }
  };
  /// The tensors of a state may lie in a file that is closed when it is loaded.
  static Tensor copy_of(const Tensor& x) {
    Tensor own = Tensor::empty_like(x);
    kernels::copy(x, own);
    return own;
  }
  struct Compressed {
    std::string name;
    Memory* memory;
    TensorView gradient;  // in memory order
    Tensor matrix;        // [m, n] in f32, with the error of the last pass
  };

  /// A matrix in memory whose rows are its first dimension, and large enough to gain by it.
  bool compresses(const TensorView& x) const {
    if (x.dims() < 2 || x.numel() == 0) return false;
    const std::int64_t m = x.size(0), n = x.numel() / m;
    if (m > 1 && x.strides[0] != n) return false;
    const double sent = static_cast<double>(options_.rank) * static_cast<double>(m + n) *
                        options_.min_compression_rate;
    return sent < static_cast<double>(x.numel());
  }

  Compressed begin(const std::string& name, const TensorView& x, std::int64_t pass) {
    const std::int64_t m = x.size(0), n = x.numel() / m;
    Memory& memory = memories_[name];
    if (!memory.finite()) memory = {};
    const Tensor matrix = Tensor::empty({m, n}, DType::f32, x.device);
    kernels::copy(memory_of(x), memory_of(matrix));
    if (memory.error.defined()) {
      settle(memory.error, matrix, name);
      kernels::axpby(1.0, memory.error, 1.0, matrix);
    }
    const std::int64_t rank = std::min({std::int64_t{options_.rank}, m, n});
    if (options_.warm_start && memory.q.defined() && memory.q.shape() == Shape{rank, n}) {
      memory.q = on_device(memory.q, x.device);
    } else {
      memory.q = random(name, {rank, n}, x.device, pass);
    }
    return {name, &memory, memory_of(x), matrix};
  }

  static Tensor on_device(const Tensor& x, Device device) {
    x.storage()->record_use(core::Stream::current(x.device()));
    if (x.device() == device) return x;
    Tensor moved = Tensor::empty(x.shape(), x.dtype(), device);
    kernels::copy(x, moved);
    return moved;
  }

  static void settle(Tensor& error, const Tensor& matrix, const std::string& name) {
    CAIRN_CHECK(error.shape() == matrix.shape(), "power_sgd", "expected a gradient '", name,
                "' of shape ", error.shape(), " as before, got ", matrix.shape(),
                " (a hook belongs to one reducer)");
    error = on_device(error, matrix.device());
  }

  /// The same on every rank.
  Tensor random(const std::string& name, const Shape& shape, Device device,
                std::int64_t pass) const {
    std::uint64_t seed = options_.seed * 1099511628211ULL + static_cast<std::uint64_t>(pass);
    for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    const Tensor drawn = Tensor::empty(shape, DType::f32, Device{});
    Generator(seed).fill_normal(drawn, 0.0, 1.0);
    return device.is_cpu() && device.index == 0 ? drawn : on_device(drawn, device);
  }

  static void average(const std::vector<TensorView>& exact, const ProcessGroup& group,
                      const std::string& name) {
    const Tensor flat = flatten(exact);
    group.all_reduce(flat, ReduceOp::mean, name);
    unflatten(flat, exact);
  }

  void approximate(std::vector<Compressed>& matrices, const ProcessGroup& group,
                   const GradientBucket& bucket) {
    std::vector<Shape> p_shapes, q_shapes;
    for (const Compressed& x : matrices) {
      p_shapes.push_back({x.memory->q.size(0), x.matrix.size(0)});
      q_shapes.push_back(x.memory->q.shape());
    }
    const Parts p(p_shapes, bucket.data.device), q(q_shapes, bucket.data.device);
    for (std::size_t i = 0; i < matrices.size(); ++i)
      kernels::matmul(matrices[i].memory->q, matrices[i].matrix.view().transpose(0, 1), p[i]);
    p.average(group, bucket.name + " (P)");
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      orthogonalize(p[i]);
      kernels::matmul(p[i], matrices[i].matrix, q[i]);
      if (options_.error_feedback) keep_error(matrices[i], p[i], q[i]);
    }
    q.average(group, bucket.name + " (Q)");
    const kernels::PendingCheck q_check = q.check();
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      finish(matrices[i], p[i], q[i], bucket.pass);
      matrices[i].memory->q_check = q_check;
    }
  }

  /// What this rank's part of the approximation leaves out.
  static void keep_error(Compressed& x, const TensorView& p, const TensorView& q) {
    x.memory->error = Tensor::empty_like(x.matrix);
    kernels::copy(x.matrix, x.memory->error);
    kernels::matmul(p.transpose(0, 1), q, x.memory->error, {.alpha = -1.0, .accumulate = true});
  }

  void finish(Compressed& x, const TensorView& p, const TensorView& q, std::int64_t pass) const {
    kernels::matmul(p.transpose(0, 1), q, x.matrix);
    kernels::copy(memory_of(x.matrix), x.gradient);
    x.memory->q = random(x.name, q.shape, q.device, pass);
    renew(p, q, x.memory->q);
  }

  /// What the next pass begins with: this one's q. Where p has a row of 0, the gradient had no more
  /// directions; those rows stay random, or directions that only the next gradient has would never
  /// be found.
  static void renew(const TensorView& p, const TensorView& q, const Tensor& next) {
    const Tensor square = Tensor::empty(p.shape, DType::f32, p.device);
    const Tensor idle = Tensor::empty({p.size(0), 1}, DType::f32, p.device);
    kernels::unary(kernels::UnaryOp::square, p, square);
    kernels::reduce(kernels::ReductionKind::sum, square, idle);
    kernels::affine(idle, -1.0, 1.0, idle);
    kernels::binary(kernels::BinaryOp::mul, next, idle, next);
    kernels::axpby(1.0, q, 1.0, next);
  }

  PowerSgdOptions options_;
  std::map<std::string, Memory> memories_;  // by gradient
};

}  // namespace

std::shared_ptr<CommunicationHook> power_sgd(const PowerSgdOptions& options) {
  CAIRN_CHECK(options.rank >= 1, "power_sgd", "expected a rank of at least 1, got ", options.rank);
  CAIRN_CHECK(options.start_step >= 0, "power_sgd", "expected start_step from 0, got ",
              options.start_step);
  CAIRN_CHECK(options.min_compression_rate >= 0.0, "power_sgd",
              "expected min_compression_rate from 0, got ", options.min_compression_rate);
  return std::make_shared<PowerSgd>(options);
}

}  // namespace cairn::parallel
