// What torch.save wrote, within a file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cairn/checkpointing/torch_file.h"
#include "formats/flat_state.h"
#include "io/mapped_file.h"

namespace cairn::checkpointing {

/// What a folder of torch.distributed.checkpoint's is known by.
inline constexpr const char* kDistributedMetadata = ".metadata";
/// What a universal checkpoint of DeepSpeed's is known by, or a folder that names its newest.
inline constexpr const char* kUniversalOptimizer = "zero/optimizer_state.pt";
inline constexpr const char* kUniversalLatest = "latest_universal";

/// A zip archive of `size` bytes from byte `offset` of the file, inside of it.
struct TorchArchive {
  std::shared_ptr<MappedFile> file;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

/// Its value as `name`, or what it holds as "name.key", "name.0". Throws as read_torch.
FlatState read_torch_archive(const TorchArchive& archive, const std::string& name,
                             const TorchReadOptions& options);

/// What a file's dictionary or list holds, in its order ("key", "key.0"); a value that stands alone
/// is `kOnlyValue`. Throws as read_torch.
FlatState read_torch_values(const std::string& path, const TorchReadOptions& options);
inline constexpr const char* kOnlyValue = "value";

}  // namespace cairn::checkpointing
