// SHA-256 (FIPS 180-4): turns a job's token into keys, and a model's description into something
// short to compare.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace cairn::parallel {

std::array<std::uint8_t, 32> sha256(std::string_view message);

}  // namespace cairn::parallel
