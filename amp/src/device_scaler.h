// A loss scaler on the device, for steps that take no host: kernels::update_scale with the options
// of a LossScaler. A static scale is one that can neither fall nor grow.
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/amp/loss_scaler.h"
#include "cairn/core/tensor.h"

namespace cairn::amp {

class DeviceScaler {
 public:
  /// write() comes next. Throws Unsupported for counts beyond 32 bits.
  DeviceScaler(const LossScaler& scaler, Device device);

  const Tensor& scale() const { return scale_; }  // f32 [1]
  void update(const TensorView& found_inf);
  /// Where a captured step finds it.
  std::vector<const void*> addresses() const {
    return {scale_.raw_data(), growth_.raw_data(), hysteresis_.raw_data(), overflows_.raw_data()};
  }
  /// From the host's, which a state has changed; what was counted is forgotten.
  void write(const LossScaler& scaler);
  /// Into the host's; waits for the device.
  void read(LossScaler& scaler) const;

  struct Overflows {
    std::int64_t all = 0;         // since write()
    std::int64_t at_minimum = 0;  // the last ones in a row that found the scale there
  };
  Overflows overflows() const;  // waits for the device

 private:
  Tensor scale_, growth_, hysteresis_, overflows_;
  LossScalerOptions options_;
};

}  // namespace cairn::amp
