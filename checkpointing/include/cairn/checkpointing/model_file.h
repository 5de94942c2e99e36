// Weights that others trained, into a model; and a model's weights, for others.
//
//   checkpointing::load(model, "resnet.pt", {.part = "state_dict", .names = {{"module.", ""}}});
//   checkpointing::load(model, "gpt2/");                       // Hugging Face's files
//   checkpointing::write_safetensors_model("export", model.state_dict());
//
// Read are: PyTorch's files (torch_file.h), safetensors files, folders as Hugging Face lays them out
// (model.safetensors, or model-00001-of-00003.safetensors ... beside model.safetensors.index.json),
// and checkpoints of Cairn's. What a path holds is told by its content.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::nn {
class Module;
}

namespace cairn::checkpointing {

enum class FileKind { checkpoint, torch, safetensors, safetensors_model };
/// Throws core::IoError where nothing can be read, core::DataError for another kind of file or
/// folder. A folder of checkpoints is a checkpoint: the one saved last.
FileKind kind_of_file(const std::string& path);

/// All of it. Tensors of PyTorch's and Hugging Face's files are mapped: those must not change while
/// the tensors live. Throws core::IoError and core::DataError, which name what is missing or damaged.
StateDict read_state(const std::string& path);

struct LoadOptions {
  bool strict = true;  // missing and surplus entries are errors; false: they are reported
  /// The dictionary of the file that holds the weights ("model", "state_dict"); empty: the whole.
  std::string part;
  /// Beginnings of names in the file, and what stands in their place in the model; the first that
  /// fits is taken. {"module.", ""} drops what torch's data parallel puts in front.
  std::vector<std::pair<std::string, std::string>> names;
};
struct LoadReport {
  std::vector<std::string> loaded, missing;  // names in the model
  std::vector<std::string> surplus;          // names in the file
};

/// Loads parameters and buffers, whatever their floating dtypes. A second name of a loaded tensor
/// (tied weights) is no surplus, and PyTorch's num_batches_tracked may be there or not. Throws
/// core::DataError, and changes nothing, which names every entry of another shape and, where strict,
/// every missing and surplus one.
LoadReport load(nn::Module& model, const std::string& path, const LoadOptions& options = {});

struct SafetensorsModelOptions {
  std::uint64_t file_bytes = 5'000'000'000;  // of tensors, at most, in a file with more than one
};
/// Writes a model's state as Hugging Face lays it out, one file or several with their index, and
/// flushes it to the disk. A tensor that is there twice (tied weights) is stored under its first
/// name; the other stands in the metadata. Throws core::InvalidArgument for a state that holds
/// anything but tensors, core::IoError where writing fails.
void write_safetensors_model(const std::string& folder, const StateDict& state,
                             const SafetensorsModelOptions& options = {});

}  // namespace cairn::checkpointing
