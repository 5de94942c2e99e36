// Passes over lists of tensors that come and go.
#pragma once

#include <memory>

namespace cairn::kernels {

/// A GPU keeps the pointer tables of the lists that passes were given, since a training step gives
/// the same ones again. Those of this thread's passes in the scope end with it, so that a
/// measurement leaves no memory behind. A pass that a graph captures needs its table from before
/// the scope, and keeps it for good.
class PassingLists {
 public:
  PassingLists();
  ~PassingLists();
  PassingLists(const PassingLists&) = delete;
  PassingLists& operator=(const PassingLists&) = delete;

  /// What this thread's innermost scope keeps, as the backend has it; null: there is no scope.
  static std::shared_ptr<void>* kept();

 private:
  std::shared_ptr<void> kept_;
  PassingLists* before_;
};

}  // namespace cairn::kernels
