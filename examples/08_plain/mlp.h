// What both programs of the MLP share: a rank's GPU, stream and communicator, and the model's
// arrays there.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "mlp_kernels.h"
#include "text.h"

namespace plain {

inline void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
inline void must(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(ncclGetErrorString(result));
}

/// A rank: its GPU, and the stream in which all of its work is.
struct Rank {
  int rank = 0, ranks = 1, gpu = 0;
  cudaStream_t stream = nullptr;
  ncclComm_t communicator = nullptr;
};

inline int variable(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

/// By a file that the ranks of one launcher on one machine know of.
inline std::filesystem::path id_file() {
  return std::filesystem::temp_directory_path() /
         ("plain_mlp-" + std::to_string(getppid()) + ".id");
}

inline ncclUniqueId shared_id(int rank) {
  const std::filesystem::path file = id_file();
  ncclUniqueId id;
  if (rank == 0) {
    must(ncclGetUniqueId(&id));
    std::ofstream(file.string() + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
    std::filesystem::rename(file.string() + ".new", file);
    return id;
  }
  for (int i = 0; i < 600 && !std::filesystem::exists(file); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (!std::ifstream(file, std::ios::binary).read(id.internal, sizeof id.internal))
    throw std::runtime_error("expected rank 0 to write " + file.string() + " within a minute");
  return id;
}

inline Rank start_rank() {
  Rank me{variable("RANK", 0), variable("WORLD_SIZE", 1), variable("LOCAL_RANK", 0)};
  must(cudaSetDevice(me.gpu));
  must(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
  must(ncclCommInitRank(&me.communicator, me.ranks, shared_id(me.rank), me.rank));
  if (me.rank == 0) std::filesystem::remove(id_file());
  return me;
}

inline void end_rank(const Rank& me) {
  must(cudaStreamSynchronize(me.stream));
  must(ncclCommDestroy(me.communicator));
  must(cudaStreamDestroy(me.stream));
}

/// n elements of GPU memory, zero at first.
template <class T>
class GpuArray {
 public:
  GpuArray(std::size_t n, cudaStream_t stream) {
    must(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(T)));
    must(cudaMemsetAsync(data, 0, n * sizeof(T), stream));
  }
  ~GpuArray() { cudaFree(data); }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;
  void copy_from(const std::vector<T>& values, cudaStream_t stream) {
    must(cudaMemcpyAsync(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice,
                         stream));
    must(cudaStreamSynchronize(stream));
  }

  T* data = nullptr;
};

template <class Real>
class Mlp {
 public:
  Mlp(const MlpSizes& s, unsigned seed, cudaStream_t stream)
      : sizes(s), layout(s), stream_(stream) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<Real> values(layout.size);
    const float w1 = 1.0f / std::sqrt(static_cast<float>(s.tokens * s.width));
    for (std::size_t i = 0; i < layout.size; ++i) {
      const bool bias = (i >= layout.b1 && i < layout.w2) || i >= layout.b2;
      values[i] = Real(bias ? 0.0f : normal(random) * (i < layout.w1 ? 1.0f : w1));
    }
    weights.copy_from(values, stream);
  }

  /// Returns the mean loss; the gradients are those of `scale` times it.
  float forward_backward(const Batch& batch, float scale) {
    std::vector<int> last;
    for (std::size_t row = 1; row <= sizes.rows; ++row)
      last.push_back(batch.targets[row * sizes.tokens - 1]);
    inputs_.copy_from(batch.inputs, stream_);
    targets_.copy_from(last, stream_);
    plain::forward_backward<Real>(sizes,
                                  {weights.data, gradients.data, inputs_.data, targets_.data,
                                   hidden_.data, dhidden_.data, dlogits_.data, losses_.data},
                                  scale, stream_);
    std::vector<float> losses(sizes.rows);
    must(cudaMemcpyAsync(losses.data(), losses_.data, losses.size() * sizeof(float),
                         cudaMemcpyDeviceToHost, stream_));
    must(cudaStreamSynchronize(stream_));
    return std::accumulate(losses.begin(), losses.end(), 0.0f) / static_cast<float>(sizes.rows);
  }

  const MlpSizes sizes;
  const MlpLayout layout;

 private:
  cudaStream_t stream_;

 public:
  GpuArray<Real> weights{layout.size, stream_}, gradients{layout.size, stream_};

 private:
  GpuArray<int> inputs_{sizes.rows * sizes.tokens, stream_}, targets_{sizes.rows, stream_};
  GpuArray<float> hidden_{sizes.rows * sizes.hidden, stream_};
  GpuArray<float> dhidden_{sizes.rows * sizes.hidden, stream_};
  GpuArray<float> dlogits_{sizes.rows * sizes.vocabulary, stream_}, losses_{sizes.rows, stream_};
};

}  // namespace plain
