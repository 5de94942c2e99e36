// The store's messages: numbers and texts packed one after another, little-endian, in one ZeroMQ
// frame.
//
// Request: id u64, rank, Request, group, then what the request needs. Reply: id, Reply, text.
#pragma once

#include <cstdint>

#include "cairn/core/packer.h"

namespace cairn::parallel::wire {

enum class Request : std::uint64_t {
  join,  // world_size, run, host, contact, timeout ms -> ok: the job's number, when all joined
  set,   // key, value                                -> ok
  get,   // key, timeout ms                           -> ok: the value, once there is one
  add,   // key, number                               -> ok: the sum as text
};
/// All but ok carry a reason. not_yet: ask again, the store that is meant is still to come.
enum class Reply : std::uint64_t { ok, timeout, refused, not_yet };

using core::Packer;
using core::Unpacker;

}  // namespace cairn::parallel::wire
