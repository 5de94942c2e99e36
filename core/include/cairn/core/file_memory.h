// Memory in files: what the system may write to disk, and the process need not hold.
//
// A block lies in a file of its own that has no name, so nothing is left behind however the process
// ends. It is memory of the CPU like any other: reading and writing it brings its pages in, where
// they stay until leave_to_file() or until the system needs the room. Allocators do not count it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "cairn/core/tensor_view.h"

namespace cairn::core {

/// Zeros, aligned to a page, for as long as somebody has them. Their room on the disk is taken at
/// once, so that a full one is an error here and not a signal later. Throws IoError, with the
/// folder's name, where it is missing, cannot be written to or has too little room.
std::shared_ptr<void> allocate_in_file(const std::string& folder, std::size_t bytes);

/// A tensor of fewer bytes is not worth a file: it stays in memory.
inline constexpr std::size_t kLeastInFile = 4096;

/// Whether a view's first element lies in such a block.
bool lies_in_file(const TensorView& x);

/// Brings in a dense view's pages; afterwards reading and writing them does not stop for the disk.
/// The calling thread waits; does nothing for a view elsewhere. Throws IoError where the disk
/// fails.
void fetch_from_file(const TensorView& x);
/// The process gives up a dense view's pages; the file keeps what was written. Does nothing for a
/// view elsewhere.
void leave_to_file(const TensorView& x);

}  // namespace cairn::core
