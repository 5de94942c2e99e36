// What the fuzzers feed: each target takes any bytes as a file of its kind, reads all of it, and
// lets nothing pass but core::DataError. Everything else (a crash, another exception, memory
// without bound) is a fault.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cairn::fuzz {

struct Target {
  const char* name;
  void (*read)(std::string_view bytes);
  std::vector<std::string> (*seeds)();  // good files to start from
};

/// zip (whole files of torch.save's), pickle, safetensors, manifest.
const std::vector<Target>& targets();
/// Throws std::out_of_range for another name.
const Target& target(std::string_view name);

}  // namespace cairn::fuzz
