// The pieces of work that are timed against a peer or against a loop over the same memory. Each
// prepares its data once, on the default device, and then runs many times.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cairn/core/tensor.h"

namespace bench {

using Run = std::function<void()>;

struct Work {
  std::string name;              // the same in bench/peer_torch.py
  std::function<Run()> prepare;  // returns what is timed
  /// What it takes a share of: the same bytes and no arithmetic, or other work; if any.
  std::function<Run()> loop = {};
  /// Bytes that a run must move: each input read and each output written as often as the algorithm
  /// needs where nothing stays in a cache. On a GPU the loop is then a copy of as many bytes.
  double bytes = 0;
  double operations = 0;     // in floating point
  double items = 0;          // tokens or images
  std::string kernels = {};  // rows of scripts/cuda_report whose bytes in flight predict its speed
};

std::vector<Work> kernel_works();
std::vector<Work> model_works();
std::vector<Work> optimizer_works();

// For a GPU: sizes that fill it, or, `tiny`, sizes for the simulated one.
std::vector<Work> memory_works(bool tiny);
std::vector<Work> product_works(bool tiny);
std::vector<Work> attention_works(bool tiny);
std::vector<Work> gpu_model_works(bool tiny);
std::vector<Work> gpu_optimizer_works(bool tiny);

/// Normal numbers on the default device, a million of them in turn.
cairn::Tensor random(const cairn::Shape& shape, cairn::DType dtype = cairn::DType::f32);
cairn::Tensor random_channels_last(const cairn::Shape& shape, cairn::DType dtype);
/// 0, 7919, 15838 ... modulo `below`, on the default device.
cairn::Tensor integers(const cairn::Shape& shape, std::int64_t below);

/// A copy on the default device that reads and writes `bytes` together.
Run device_copy(double bytes);

}  // namespace bench
