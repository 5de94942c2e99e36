// A picture of the devices' memory, two bars each, as SVG.
#pragma once

#include <string>
#include <vector>

#include "cairn/core/device.h"

namespace balanced {

/// Peak bytes of each device, with gathered outputs and with balanced ones.
void save_picture(const std::string& path, const std::vector<cairn::Device>& devices,
                  const std::vector<std::size_t>& gathered, const std::vector<std::size_t>& even);

}  // namespace balanced
