#include "cairn/parallel/communication_hook.h"

#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::parallel {
namespace {

class Function final : public CommunicationHook {
 public:
  Function(std::string name, std::function<void(const GradientBucket&, const ProcessGroup&)> reduce)
      : name_(std::move(name)), reduce_(std::move(reduce)) {}
  void reduce(const GradientBucket& bucket, const ProcessGroup& group) override {
    reduce_(bucket, group);
  }
  std::string describe() const override { return name_; }

 private:
  std::string name_;
  std::function<void(const GradientBucket&, const ProcessGroup&)> reduce_;
};

}  // namespace

std::shared_ptr<CommunicationHook> communication_hook(
    std::function<void(const GradientBucket&, const ProcessGroup&)> reduce) {
  CAIRN_CHECK(reduce, "communication_hook", "expected a function, got an empty one");
  return std::make_shared<Function>("a function", std::move(reduce));
}

std::shared_ptr<CommunicationHook> compress_to(DType dtype) {
  CAIRN_CHECK(core::is_half(dtype), "compress_to", "expected f16 or bf16, got ", dtype);
  const auto reduce = [dtype](const GradientBucket& bucket, const ProcessGroup& group) {
    const TensorView& data = bucket.data;
    if (core::is_half(data.dtype)) return group.all_reduce(data, ReduceOp::mean, bucket.name);
    const Tensor small = Tensor::empty(data.shape, dtype, data.device);
    kernels::affine(data, 1.0 / group.world_size(), 0.0, small);
    group.all_reduce(small, ReduceOp::sum, bucket.name);
    kernels::copy(small, data);
  };
  return std::make_shared<Function>(core::str("compress_to(", dtype, ")"), reduce);
}

}  // namespace cairn::parallel
