#include "cairn/nn/sequential.h"

namespace cairn::nn {

Module& Sequential::at(std::size_t i) const {
  CAIRN_CHECK(i < size(), "sequential", "expected an index below ", size(), ", got ", i);
  return *children()[i].second;
}

Tensor Sequential::forward(const Tensor& x) {
  if (const Runner runner = runner_) return runner(*this, x);
  Tensor y = x;
  for (const auto& [name, child] : children()) y = (*child)(y);
  return y;
}

std::shared_ptr<Module> Sequential::make_like() const {
  auto copy = std::make_shared<Sequential>();
  for (const auto& [name, child] : children()) copy->add(make_like_of(*child));
  copy->set_runner(runner_);
  return copy;
}

}  // namespace cairn::nn
