// Images that have travelled as bytes.
#pragma once

#include "cairn/core/tensor.h"
#include "cairn/data/loader.h"

namespace support {

/// data::LoaderOptions::normalize_on_device: f32, where the inputs are.
cairn::Tensor normalize(const cairn::Tensor& inputs, const cairn::data::Normalize& rule);

}  // namespace support
