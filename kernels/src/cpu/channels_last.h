// Images as the channels-last kernels want them: where a view is stored otherwise, a copy stands in
// for it.
#pragma once

#include "backend.h"
#include "temporary.h"

namespace cairn::kernels {

/// An image to read, channels-last and of that dtype.
inline Temporary image_input(const Backend& backend, const TensorView& image, DType dtype) {
  if (image.dtype == dtype && image.is_channels_last()) return {Tensor(), image};
  Temporary copy =
      temporary(image.shape, core::channels_last_strides(image.shape), dtype, image.device);
  backend.copy(image, copy.view);
  return copy;
}
inline Temporary image_input(const Backend& backend, const TensorView& image) {
  return image_input(backend, image, image.dtype);
}

/// Room for an image to write; finish_output brings it to where it belongs.
inline Temporary image_output(const TensorView& image, DType dtype) {
  if (image.dtype == dtype && image.is_channels_last()) return {Tensor(), image};
  return temporary(image.shape, core::channels_last_strides(image.shape), dtype, image.device);
}
inline Temporary image_output(const TensorView& image) {
  return image_output(image, image.dtype);
}

inline void finish_output(const Backend& backend, const Temporary& written,
                          const TensorView& image) {
  if (written.owner.defined()) backend.copy(written.view, image);
}

}  // namespace cairn::kernels
