// How long an optimizer's update takes.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <tuple>

#include "cairn/core/device.h"
#include "training_plan/model_bytes.h"

namespace cairn::checkpointing {

/// Seconds for each element: of the check of its gradient, of its update.
struct ElementSeconds {
  double check = 0, update = 0;
};

class UpdateMeter {
 public:
  /// `folder`: for states in files.
  UpdateMeter(Device device, std::size_t trained_elements, std::string folder)
      : device_(device), trained_elements_(trained_elements), folder_(std::move(folder)) {}

  /// Measured once for each kind, on as many of the elements as `room` bytes have place for. Of
  /// states in files with their way in and out; of states on the host the slowest of the update,
  /// the gradients' way down and the weights' way up, which go on at once.
  ElementSeconds of(const StepKind& kind, std::size_t room);

 private:
  ElementSeconds measure(const StepKind& kind, std::size_t room) const;

  Device device_;
  std::size_t trained_elements_;
  std::string folder_;
  std::map<std::tuple<DType, DType, DType, DType, bool, bool>, ElementSeconds> measured_;
};

}  // namespace cairn::checkpointing
