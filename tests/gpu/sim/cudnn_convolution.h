// The simulated cuDNN's convolutions: the engines that it has for them, and what they compute.
#pragma once

#include <cudnn.h>

#include <array>
#include <string>
#include <vector>

#include "gpu/sim/cudnn_tensor.h"
#include "gpu/sim/machine.h"

namespace cairn::gpusim {

enum class CudnnPass { forward, backward_data, backward_filter };

/// y from x and w, whatever is computed of the three.
struct CudnnConvolution {
  CudnnPass pass = CudnnPass::forward;
  CudnnTensor x, w, y;
  std::array<std::int64_t, 2> padding{}, stride{}, dilation{};
  cudnnDataType_t compute = CUDNN_DATA_FLOAT;
  double alpha = 1.0, beta = 0.0;

  std::int64_t groups() const { return x.sizes[1] / w.sizes[1]; }
  const CudnnTensor& result() const;
  bool is_consistent() const;
};

/// How an engine computes.
enum class CudnnPrecision { full, tf32, low };

struct CudnnEngine {
  std::vector<cudnnBackendNumericalNote_t> notes;
  bool has_tiles;  // takes the knob CUDNN_KNOB_TYPE_TILE_SIZE, 0 to kCudnnTiles - 1
};
inline constexpr std::int64_t kCudnnTiles = 4;

/// An engine with its knobs set.
struct CudnnConfig {
  std::int64_t engine = 0;
  std::int64_t tile = 0;
};

/// By the engines' global indices.
std::vector<CudnnEngine> engines_of(const CudnnConvolution& problem);
/// Heuristics' proposals: the best first, but nothing of determinism, and no promise.
std::vector<CudnnConfig> proposals(const CudnnConvolution& problem, cudnnBackendHeurMode_t mode);
/// Whether a plan can be made of it, and the workspace that it wants then.
cudnnStatus_t check_support(const CudnnConvolution& problem, const CudnnConfig& config);
std::size_t workspace_of(const CudnnConvolution& problem, const CudnnConfig& config);

/// Pointers to x, w and y; which one is written depends on the pass. Inside work.
void run_convolution(const CudnnConvolution& problem, const CudnnConfig& config,
                     const std::array<void*, 3>& data);

}  // namespace cairn::gpusim
