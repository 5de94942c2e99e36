// What CAIRN_PRODUCTS or the program says of routes.
#pragma once

#include <cstdint>
#include <string>

namespace cairn::kernels {

inline constexpr const char *kTimeProducts = "time", *kDefaultProducts = "default";

/// `time`, `default` or the name of a route.
std::string product_setting();
/// Changes whenever the setting or the preferred choices do: what was derived from them is stale.
std::uint64_t product_setting_epoch();

// For first_uses(): one more, which took so long.
void count_primitive(double seconds);
void count_timing(double seconds);

}  // namespace cairn::kernels
