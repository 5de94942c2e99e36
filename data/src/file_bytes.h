// Whole files as bytes.
#pragma once

#include <string>
#include <string_view>

namespace cairn::data::detail {

/// The file's bytes. Throws IoError "[where] ... 'path'" where it cannot be read.
std::string read_file(const std::string& path, std::string_view where);

/// The same, unpacked if it starts as a gzip file does (several members in a row are one text).
/// Throws DataError for a damaged stream.
std::string read_maybe_gzip(const std::string& path, std::string_view where);

}  // namespace cairn::data::detail
