// Proof that the other end of each connection knows the job's token.
#pragma once

#include <chrono>
#include <string>

#include "transports/mesh.h"

namespace cairn::parallel {

/// Each pair of ranks challenges each other over the mesh: a random number there, a keyed hash
/// (with a key from the token) of both numbers and both ranks back. Throws CommunicationError
/// naming the rank whose connection is somebody else's, or silent.
void authenticate(Mesh& mesh, const std::string& token, std::chrono::milliseconds timeout);

}  // namespace cairn::parallel
