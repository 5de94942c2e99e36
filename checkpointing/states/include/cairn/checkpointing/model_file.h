// Weights that others trained, into a model. state_file.h says which files are read, and writes a
// model's weights for others.
//
//   checkpointing::load(model, "resnet.pt", {.part = "state_dict", .names = {{"module.", ""}}});
//   checkpointing::load(model, "gpt2/");                       // Hugging Face's files
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cairn/checkpointing/state_file.h"

namespace cairn::checkpointing {

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

/// Loads parameters and buffers, whatever their floating dtypes. Weights that are deferred
/// (nn::DeferredInit) stay so: each is read when it is used, of safetensors files one tensor at a
/// time (an IoError comes then). A second name of a loaded tensor
/// (tied weights) is no surplus, and PyTorch's num_batches_tracked may be there or not. Throws
/// core::DataError, and changes nothing, which names every entry of another shape and, where
/// strict, every missing and surplus one.
LoadReport load(core::Stateful& model, const std::string& path, const LoadOptions& options = {});

}  // namespace cairn::checkpointing
