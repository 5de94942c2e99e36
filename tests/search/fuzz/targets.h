// What the fuzzers feed: each target takes any bytes as a file of its kind, reads all of it, and
// lets nothing pass but core::DataError, and of a folder that names others core::IoError.
// Everything else (a crash, another exception, memory without bound) is a fault.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cairn::fuzz {

struct Target {
  const char* name;
  bool (*read)(std::string_view bytes);  // whether they were such a file
  std::vector<std::string> (*seeds)();   // to start from; some are good files
};

/// zip (whole files of torch.save's), pickle, distributed (the .metadata of a folder of
/// torch.distributed.checkpoint's), deepspeed (the model states and the optimizer's state of a
/// universal checkpoint), safetensors, manifest, picture (JPEG and PNG), tokenizer.
const std::vector<Target>& targets();
/// Throws std::out_of_range for another name.
const Target& target(std::string_view name);

}  // namespace cairn::fuzz
