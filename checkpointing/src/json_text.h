// JSON parsed strictly: nlohmann's parser keeps the last of two equal keys, which would let a
// damaged file pass.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace cairn::checkpointing {

/// Throws core::DataError "[where] expected ... in '<path>'" for text that is not JSON or repeats a
/// key in one object.
nlohmann::ordered_json parse_json(const std::string& text, const char* where,
                                  const std::string& path);

}  // namespace cairn::checkpointing
