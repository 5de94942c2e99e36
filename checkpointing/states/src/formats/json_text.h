// JSON parsed strictly: nlohmann's parser keeps the last of two equal keys, which would let a
// damaged file pass, and its values recurse once a level, so that a deep enough text overflows the
// stack.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cairn/core/shape.h"

namespace cairn::checkpointing {

inline constexpr std::size_t kDeepestJson = 32;       // levels; what Cairn writes has five
inline constexpr std::size_t kMostOrderedKeys = 256;  // what Cairn writes has a dozen

/// Keys keep their order, in which each is compared with all before it. Throws core::DataError
/// "[where] expected ... in '<path>'" for text that is not JSON, repeats a key in one object, has
/// more than kMostOrderedKeys there or nests deeper than kDeepestJson.
nlohmann::ordered_json parse_json(const std::string& text, const char* where,
                                  const std::string& path);

/// Keys are sorted, any number of them.
nlohmann::json parse_large_json(const std::string& text, const char* where,
                                const std::string& path);

/// A string as it stands in JSON, as nlohmann's dump() writes it. Throws core::InvalidArgument,
/// as `where`, for text that is not UTF-8.
std::string json_string(const std::string& text, const char* where);

/// "[2,3]".
std::string json_sizes(const core::Shape& shape);

/// Compact JSON as nlohmann's dump(1) writes it: a line a value.
std::string json_in_lines(const std::string& compact);

}  // namespace cairn::checkpointing
