// A picture of what the model learnt: test digits with its predictions, as SVG.
#pragma once

#include <string>

#include "cairn/data/loader.h"
#include "cairn/nn/module.h"

namespace digits {

void save_picture(const std::string& path, cairn::nn::Module& model,
                  const cairn::data::TensorDataset& test, const cairn::data::Normalize& normalize,
                  cairn::Device device);

}  // namespace digits
