// Which operations are matrix products or convolutions, and whether tensor cores like their sizes.
#pragma once

#include <optional>
#include <string>

#include "cairn/autograd/observer.h"

namespace cairn::amp {

/// Unset for anything but a product; empty where it runs in half with every size a multiple of 8;
/// else what is in the way.
std::optional<std::string> tensor_core_misfit(const autograd::OpEvent& event);

}  // namespace cairn::amp
