// A rank's side: it loops over collectives, checks what they give, and does its own fault.
#pragma once

#include <cstdint>

#include "fault.h"

namespace cairn::test {

/// Writes lines to standard error, each with the monotonic clock in nanoseconds:
///   at TIME              the fault's iteration is reached
///   error TIME TYPE TEXT
///   ok TIME              the loop ended, and every result was right; or this rank left
///   wrong TIME TEXT
void run_rank(const Fault& fault, int rank);

std::int64_t nanoseconds_now();

}  // namespace cairn::test
