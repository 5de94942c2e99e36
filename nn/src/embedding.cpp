#include "cairn/nn/embedding.h"

#include "cairn/autograd/ops.h"
#include "cairn/core/memory.h"
#include "cairn/nn/init.h"

namespace cairn::nn {

Embedding::Embedding(std::int64_t count, std::int64_t size) {
  CAIRN_CHECK(count > 0 && size > 0, "Embedding", "expected positive sizes, got ", count, " and ",
              size);
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  weight_ = Tensor::empty({count, size});
  init::normal(weight_);
  add_parameter("weight", weight_);
  extra_ = core::str(count, " x ", size);
}

Tensor Embedding::forward(const Tensor& index) {
  return autograd::embedding(weight_, index);
}

std::shared_ptr<Module> Embedding::make_like() const {
  return std::make_shared<Embedding>(weight_.size(0), weight_.size(1));
}

}  // namespace cairn::nn
