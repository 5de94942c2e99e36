// A model of two weights, whose gradients a test chooses, alone or on two ranks.
#pragma once

#include <gmock/gmock.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/ops.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/accumulation.h"
#include "cairn/optim/optim.h"
#include "cairn/parallel/distributed.h"
#include "cairn/parallel/process_group.h"

namespace cairn::orders {

/// loss = sum(x * a) + sum(x * b): the gradient of both weights is x. Weights [4], of 1.1, which no
/// half type holds.
class Pair : public nn::Module {
 public:
  Pair()
      : a_(add_parameter("a", Tensor::full({4}, 1.1))),
        b_(add_parameter("b", Tensor::full({4}, 1.1))) {}
  std::string kind() const override { return "Pair"; }
  Tensor forward(const Tensor& x) override {
    return autograd::add(autograd::sum(autograd::mul(a_, x)), autograd::sum(autograd::mul(b_, x)));
  }
  Tensor a() const { return a_; }
  Tensor b() const { return b_; }

 protected:
  std::shared_ptr<nn::Module> make_like() const override { return std::make_shared<Pair>(); }

 private:
  Tensor a_, b_;
};

inline Tensor input(double gradient) {
  return Tensor::full({4}, gradient);
}

inline double value(const Tensor& weight) {
  return kernels::master_value(weight).to_vector().front();
}

/// y = x; its backward throws while it is told to.
struct Breaks {
  static constexpr autograd::OpInfo kInfo{"breaks"};
  const bool* broken;
  Tensor forward(autograd::Context&, const Tensor& x) { return x.detach(); }
  autograd::Tensors backward(autograd::Context&, const Tensor& dy) {
    if (*broken) core::fail<core::OutOfMemory>("breaks", "expected memory, got none");
    return {dy};
  }
};

/// Every rank in a thread of its own; rethrows the first error.
inline void on_ranks(int count, const std::function<void(parallel::ProcessGroup&)>& body) {
  std::vector<parallel::ProcessGroup> groups =
      parallel::ProcessGroup::in_process(count, {.timeout = std::chrono::milliseconds(5000)});
  std::vector<std::exception_ptr> errors(groups.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        body(groups[i]);
      } catch (...) {
        errors[i] = std::current_exception();
        groups[i].abort("a test failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// What a call says when it refuses; empty where it does not.
template <class F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const core::Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace cairn::orders
