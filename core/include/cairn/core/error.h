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
};
class InvalidArgument : public Error {  // a wrong shape, dtype, device, option or index
 public:
  using Error::Error;
};
class Unsupported
    : public Error {  // right, but this build or machine cannot do it; the message names the remedy
 public:
  using Error::Error;
};
class OutOfMemory : public Error {
 public:
  using Error::Error;
};
class IoError : public Error {  // a file or folder that cannot be read or written
 public:
  using Error::Error;
};
class DataError
    : public Error {  // a file that was read and is damaged, truncated or of another kind
 public:
  using Error::Error;
};
class DeviceError : public Error {  // a failing CUDA, cuBLASLt, cuDNN or oneDNN call
 public:
  using Error::Error;
};
class CommunicationError : public Error {  // a rank that is missing, late, dead or out of step
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
