// What a reducer may be asked for.
#pragma once

#include <cstdint>
#include <string>

#include "cairn/parallel/reducer.h"

namespace cairn::parallel {

/// Throws InvalidArgument for a value out of range and for a combination that makes no sense.
void check_options(const ReducerOptions& options);
void check_sizes(std::int64_t first_bucket_bytes, std::int64_t bucket_bytes);

/// What all ranks must have alike, a line an option: it decides what is reduced when, and into
/// what.
std::string list_options(const ReducerOptions& options);

}  // namespace cairn::parallel
