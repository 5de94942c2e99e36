// Typed errors. Every message reads "[where] expected ..., got ... (what to do)".
//
// InvalidArgument is the caller's mistake (shape, dtype, device, value); the others name what
// failed outside. Cairn never ends the process and never prints an error instead of throwing it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace cairn::core {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  const char* what() const noexcept override;
  /// It came out of the forward of this layer: what() ends with "(in layer3.0.conv1)". Each layer
  /// around puts its own name in front.
  void add_layer(const std::string& name);

 private:
  std::string layer_, text_;  // both empty where it is of no layer
};
/// A shape, dtype, device, option or index is wrong.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};
/// The request is right, but this build or machine cannot serve it; the message names the remedy.
class Unsupported : public Error {
 public:
  using Error::Error;
};
/// A device has no memory left; the message says what holds it (see memory.h).
class OutOfMemory : public Error {
 public:
  using Error::Error;
};
/// A file or folder cannot be read or written.
class IoError : public Error {
 public:
  using Error::Error;
};
/// A file was read, and is damaged, truncated or of another kind.
class DataError : public Error {
 public:
  using Error::Error;
};
/// A call of CUDA, cuBLASLt, cuDNN or oneDNN failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};
/// A rank is missing, late, dead or out of step.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// Concatenates anything with an operator<<.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// Throws E with the message "[where] args...".
template <class E = InvalidArgument, class... Args>
[[noreturn]] void fail(std::string_view where, const Args&... args) {
  throw E(str("[", where, "] ", args...));
}

}  // namespace cairn::core

/// Throws core::InvalidArgument("[where] ...") unless the condition holds. The message is built
/// only on failure.
#define CAIRN_CHECK(condition, where, ...)                       \
  do {                                                           \
    if (!(condition)) ::cairn::core::fail((where), __VA_ARGS__); \
  } while (false)
