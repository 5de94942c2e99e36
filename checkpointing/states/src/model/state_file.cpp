#include "cairn/checkpointing/state_file.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "checkpoint/step_folder.h"
#include "formats/flat_state.h"
#include "formats/safetensors/model.h"
#include "formats/torch/archive.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_kind(const std::string& path) {
  core::fail<core::DataError>(
      "file",
      "expected a checkpoint, a folder of checkpoints, a safetensors file, a folder with "
      "model.safetensors or its index, a file of torch.save's, a folder of "
      "torch.distributed.checkpoint's, or a universal checkpoint of DeepSpeed's (its "
      "ds_to_universal makes one), got '",
      path, "', which is none of them");
}

FileKind kind_of_folder(const std::string& path) {
  const fs::path folder = path;
  if (exists((folder / kManifestName).string())) return FileKind::checkpoint;
  if (exists((folder / kModelIndex).string()) || exists((folder / kModelFile).string())) {
    return FileKind::safetensors_model;
  }
  if (exists((folder / kDistributedMetadata).string())) return FileKind::torch_distributed;
  if (exists((folder / kUniversalLatest).string()) ||
      exists((folder / kUniversalOptimizer).string())) {
    return FileKind::deepspeed_universal;
  }
  if (!list_checkpoints(path).empty()) return FileKind::checkpoint;
  fail_kind(path);
}

}  // namespace

FileKind kind_of_file(const std::string& path) {
  if (fs::is_directory(path)) return kind_of_folder(path);
  const ReadableFile file(path);
  std::array<char, 9> start{};  // safetensors: the header's length, and the header, a JSON object
  file.read(0, start.data(), std::min<std::uint64_t>(file.size(), start.size()));
  if (start[0] == 'P' && start[1] == 'K') return FileKind::torch;
  if (path.ends_with(".json")) return FileKind::safetensors_model;
  if (start[8] == '{' || path.ends_with(".safetensors")) return FileKind::safetensors;
  for (const char* ending : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (path.ends_with(ending)) return FileKind::torch;
  }
  fail_kind(path);
}

StateDict read_state(const std::string& path) {
  switch (kind_of_file(path)) {
    case FileKind::torch:
      return read_torch(path);
    case FileKind::torch_distributed:
      return read_torch_distributed(path);
    case FileKind::deepspeed_universal:
      return read_deepspeed_universal(path);
    case FileKind::safetensors:
    case FileKind::safetensors_model:
      return unflatten(read_safetensors_model(path));
    case FileKind::checkpoint:
      break;
  }
  const bool is_one = exists((fs::path(path) / kManifestName).string());
  return read_checkpoint(is_one ? path : newest_line(path).front());
}

}  // namespace cairn::checkpointing
