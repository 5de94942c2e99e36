// A checkpoint's contents, as one rank of a job needs them.
#pragma once

#include <functional>
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/stored_file.h"

namespace cairn::checkpointing {

/// The contents of the manifest's files for which `wanted` says yes, verified: "model" ..., and
/// "rank-0" ... of the ranks' own. Throws core::DataError naming all damage.
StateDict read_files(const std::string& path, const Manifest& manifest, ReadBy by,
                     const std::function<bool(const std::string& file)>& wanted);

/// The ranks of a job read all files between them: each the shared one, and of the ranks' own those
/// that fall to it, its own among them.
bool falls_to(const std::string& file, int rank, int world_size);

/// The seed of a rank that the saved job did not have: it draws on from another rank's place, under
/// a seed of its own.
std::uint64_t seed_of_new_rank(std::uint64_t seed, int rank);

}  // namespace cairn::checkpointing
