// What the operations of this thread read, make and write, told by libtorch's RecordFunction.
#pragma once

#include <torch/types.h>

#include <unordered_set>
#include <vector>

namespace cairn::libtorch {

/// While it lives, of the operations that are called on this thread (those within them aside).
/// Watches nest, and each sees all.
class OperationWatch {
 public:
  OperationWatch();
  ~OperationWatch();
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;

  /// Whether an operation has read it, or what it is a view of, that none made since the watch
  /// began: a parameter, a buffer, an input.
  bool existed(const at::Tensor& x) const;
  /// Memory of tensors without a gradient that existed and were written: running statistics,
  /// counters.
  const std::vector<at::Tensor>& written() const { return written_; }

  struct Callbacks;

 private:
  void begins(const at::Tensor& argument, bool writes);
  void made(const at::Tensor& result);

  std::unordered_set<const void*> existed_, made_;  // storages
  std::vector<at::Tensor> written_;
};

}  // namespace cairn::libtorch
