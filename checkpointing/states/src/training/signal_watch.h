// A signal that only sets a mark.
#pragma once

#include <csignal>

namespace cairn::checkpointing {

/// Handles the signal while it lives; what handled it before does again afterwards.
class SignalWatch {
 public:
  /// Throws core::InvalidArgument for a signal that cannot be handled.
  explicit SignalWatch(int number);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// Whether it has come since the watch was made.
  bool came() const;

 private:
  int number_;
  struct sigaction before_ {};
};

}  // namespace cairn::checkpointing
