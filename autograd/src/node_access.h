// The engine's and apply's view of contexts and nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/autograd/function.h"
#include "cairn/autograd/saved_tensor.h"

namespace cairn::autograd {

struct InputInfo {
  bool needs_grad = false;
  bool handed_out = false;  // grad_target was asked in this backward, and what it gave must return
  Tensor handed;            // that, where it is no leaf's by itself
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  Strides strides;             // dense
  std::shared_ptr<Node> edge;  // what takes the gradient; null where none is needed
};

struct Context::Impl {
  const char* op = "";
  std::uint64_t sequence = 0;
  std::vector<InputInfo> inputs;
  std::vector<SavedTensor> saved;
  std::int64_t bytes_saved = 0;
  bool released = false;
  bool retained = false;  // the running backward keeps the saved tensors
  // Of the result.
  Shape shape;
  DType dtype = DType::f32;
  Device device;
};

struct NodeAccess {
  static Context::Impl* impl(Context& context) { return context.impl_.get(); }
  static void start(Context& context) { context.impl_ = std::make_unique<Context::Impl>(); }
  static Context::Impl* impl(Node& node) { return node.context_.impl_.get(); }  // null: leaf
  static void mark_leaf(Node& node) { node.leaf_ = true; }
  static bool is_leaf(const Node& node) { return node.leaf_; }
  static bool is_cast(const Node& node) { return node.info_.converts; }
};

/// The node that takes gradients of the tensor: the one that made it, or the leaf's.
std::shared_ptr<Node> gradient_edge(const Tensor& tensor);

}  // namespace cairn::autograd
