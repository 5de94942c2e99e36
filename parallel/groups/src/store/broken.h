// The error of a job that is broken.
#pragma once

#include <string>
#include <string_view>

#include "cairn/core/error.h"

namespace cairn::parallel {

/// Thrown to who needs a group that is broken; reason() is what every rank hears.
class GroupBroken : public core::CommunicationError {
 public:
  GroupBroken(std::string_view where, const std::string& reason)
      : CommunicationError(core::str("[", where, "] ", reason)), reason_(reason) {}
  const std::string& reason() const { return reason_; }

 private:
  std::string reason_;
};

}  // namespace cairn::parallel
