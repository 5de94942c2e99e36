// Whatever holds a training's state or a model's weights: read whole, and weights written for
// others.
//
//   StateDict state = checkpointing::read_state("gpt2/");      // Hugging Face's files
//   checkpointing::write_safetensors_model("export", model.state_dict());
//   checkpointing::write_safetensors_model("export", model.state_dict(), {.world = ddp.world()});
//
// Read are: PyTorch's files and folders and DeepSpeed's universal checkpoints (torch_file.h),
// safetensors files, folders as Hugging Face lays them out (model.safetensors, or
// model-00001-of-00003.safetensors ... beside model.safetensors.index.json), and checkpoints of
// Cairn's. What a path holds is told by its content.
#pragma once

#include <cstdint>
#include <string>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

enum class FileKind {
  checkpoint,
  torch,
  torch_distributed,
  deepspeed_universal,
  safetensors,
  safetensors_model
};
/// Throws core::IoError where nothing can be read, core::DataError for another kind of file or
/// folder. A folder of checkpoints is a checkpoint: the one saved last.
FileKind kind_of_file(const std::string& path);

/// All of it. Tensors of PyTorch's, DeepSpeed's and Hugging Face's files are mapped: those must not
/// change while the tensors live. Throws core::IoError and core::DataError, which name what is
/// missing or damaged.
StateDict read_state(const std::string& path);

struct SafetensorsModelOptions {
  std::uint64_t file_bytes = 5'000'000'000;  // of tensors, at most, in a file with more than one
  /// The ranks that write together; `ddp.world()`. Of a state with shards it must be all that hold
  /// some.
  World world = {};
};
/// Writes a model's state as Hugging Face lays it out, one file or several with their index, and
/// flushes it to the disk. A tensor that is there twice (tied weights) is stored under its first
/// name; the other stands in the metadata. Throws core::InvalidArgument for a state that holds
/// anything but tensors, core::IoError where writing fails.
///
/// With a world it is a collective, into a folder that all ranks see. Each rank writes its shards
/// where they belong in the file, and rank 0 what is whole: no rank holds more than before. Throws
/// core::InvalidArgument on all ranks where their states differ or shards are missing; where one
/// rank fails the others' IoError quotes it.
void write_safetensors_model(const std::string& folder, const StateDict& state,
                             const SafetensorsModelOptions& options = {});

}  // namespace cairn::checkpointing
