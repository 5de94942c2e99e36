// Open files, of which each rank takes some for all others.
#pragma once

#include <string>

namespace cairn::parallel {

/// Raises the limit to the hard one, which is the one that counts. Throws core::Unsupported where
/// even that leaves no room for a connection with each of so many ranks: ZeroMQ ends the process
/// then.
void make_room_for_connections(int ranks);
/// " (this process has 58 files open ...)", for an error that may come of it; empty: there are
/// enough left.
std::string descriptor_hint();

}  // namespace cairn::parallel
