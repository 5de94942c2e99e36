// A picture of what the generator learnt: samples beside training images, as SVG.
#pragma once

#include <string>
#include <vector>

#include "cairn/data/dataset.h"

namespace dcgan {

inline constexpr int kSamples = 64;

/// samples [kSamples, 1, 28, 28] in (-1, 1), 1 being ink.
void save_picture(const std::string& path, const cairn::Tensor& samples,
                  const cairn::data::TensorDataset& real);

}  // namespace dcgan
