// In place of the CUDA runtime, for code that nvcc compiled: launches go to a function of the test.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace cairn::ptx {

struct Launch {
  std::string kernel;
  unsigned blocks, threads;
  std::size_t shared_bytes;
  void* stream;
  void** parameters;  // the address of each
};

/// What runs a launch. A launch beyond what cudaFuncSetAttribute has allowed fails before.
void set_launcher(std::function<void(const Launch&)> launcher);

}  // namespace cairn::ptx
