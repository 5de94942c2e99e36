// What a model's weights, gradients and optimizer state take at a precision, and how long their update.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/device.h"

namespace cairn::nn {
class Module;
}

namespace cairn::checkpointing {

struct StepBytes {
  std::size_t weights = 0, gradients = 0, optimizer_state = 0;
};

class ModelBytes {
 public:
  /// Of an f32 model as it stands on the device now. Throws core::InvalidArgument for another one.
  ModelBytes(nn::Module& model, Device device);

  StepBytes of(const Precision& precision, bool compact, int moments, bool accumulates) const;
  /// As a backward makes it: in the weight's dtype.
  std::size_t largest_gradient(const Precision& precision) const;
  /// What the device holds beside the model's weights, gradients and optimizer state.
  std::size_t other() const { return other_; }
  /// Measured once, on as many of the elements as `room` bytes have place for: a check and an
  /// update.
  double update_seconds(const Precision& precision, bool compact, int moments, bool accumulates,
                        std::size_t room);

 private:
  struct Parameter {
    std::size_t elements;
    bool trained, may_be_half;
  };
  double update_seconds_per_element(const Precision& precision, bool compact, int moments,
                                    bool accumulates, std::size_t room) const;

  Device device_;
  std::vector<Parameter> parameters_;
  std::size_t trained_elements_ = 0, other_ = 0;
  std::map<std::tuple<DType, bool, int, bool>, double> measured_;
};

/// A copy with all but batch norms' tensors in half, as amp casts a model at O2.
std::shared_ptr<nn::Module> half_clone(const nn::Module& module, DType half);

}  // namespace cairn::checkpointing
