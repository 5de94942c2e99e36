// Room in a file that has no name, mapped into memory: it is gone when nobody has it any more, or
// with the process.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace cairn::checkpointing {

/// Writable memory backed by a nameless file in `folder`, whose blocks are allocated. Throws
/// core::IoError.
std::shared_ptr<void> map_nameless_file(const std::string& folder, std::size_t bytes);
/// The process gives up these pages of it (from a page's begin on); the file keeps them.
void leave_to_file(void* memory, std::size_t bytes);

}  // namespace cairn::checkpointing
