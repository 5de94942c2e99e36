#include "cuda/cublaslt/algorithms.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "cairn/core/log.h"
#include "choices.h"
#include "cuda/bounded_cache.h"
#include "cuda/error.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {

namespace {

using Algorithms = std::vector<Algorithm>;

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // the most an algorithm may take, per stream
constexpr std::size_t kKeptShapes = 4096;
constexpr int kMostAlgorithms = 8;
constexpr double kWorthTiming = 1 << 20;  // multiplications; below, a launch is all there is
constexpr double kWorthLeaving = 0.97;    // of the first proposal's time: less is as likely noise
constexpr int kRounds = 3, kRunsARound = 4;

Algorithms proposed(const Queue& queue, const GemmShape& shape, const Problem& problem) {
  cublasLtMatmulPreference_t made = nullptr;
  check_cublaslt(cublasLtMatmulPreferenceCreate(&made), queue, "cublasLtMatmulPreferenceCreate");
  const Preference preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_cublaslt(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
                   queue, "cublasLtMatmulPreferenceSetAttribute");
  };
  const auto alignment = [](const GemmMatrix& m) {
    return static_cast<std::uint32_t>(m.alignment);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(shape.b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(shape.a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(shape.y));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(shape.y));
  cublasLtMatmulHeuristicResult_t results[kMostAlgorithms];
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_for(queue), problem.operation.get(), problem.first.get(), problem.second.get(),
      problem.result.get(), problem.result.get(), made, kMostAlgorithms, results, &count);
  Algorithms found;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return found;
  check_cublaslt(status, queue, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      found.push_back({results[i].algo, results[i].workspaceSize});
  }
  return found;
}

double multiplications(const GemmShape& shape) {
  return static_cast<double>(shape.batch * shape.m) * static_cast<double>(shape.n * shape.k);
}

/// From the first element to past the last.
std::size_t extent(const GemmShape& shape) {
  const GemmMatrix& y = shape.y;
  const std::int64_t elements = (shape.batch - 1) * y.batch_stride + (shape.m - 1) * y.ld + shape.n;
  return static_cast<std::size_t>(elements) * core::size_of(y.dtype);
}

/// Seconds of some runs of an algorithm; infinite where it refuses.
class Stopwatch {
 public:
  Stopwatch(const Queue& queue, const GemmShape& shape, const Problem& problem)
      : queue_(queue), problem_(problem), y_(problem.pointers.y) {
    if (!shape.accumulate) return;  // y is written anew after the timing
    scratch_ = queue.workspace(extent(shape));
    y_ = scratch_->data();
  }

  double seconds(const Algorithm& algorithm) const {
    wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRunsARound; ++i) {
      const cublasStatus_t status = problem_.run(queue_, algorithm, y_);
      if (status == CUBLAS_STATUS_NOT_SUPPORTED) return std::numeric_limits<double>::infinity();
      check_cublaslt(status, queue_, "cublasLtMatmul");
    }
    wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void wait() const {
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(queue_.stream())), queue_.op(),
               "cudaStreamSynchronize");
  }

  const Queue& queue_;
  const Problem& problem_;
  void* y_;
  std::shared_ptr<core::Storage> scratch_;
};

/// In turn, so that what else the GPU does falls on all; the best of each counts.
std::size_t fastest(const Queue& queue, const GemmShape& shape, const Problem& problem,
                    const Algorithms& candidates) {
  const Stopwatch watch(queue, shape, problem);
  for (const Algorithm& candidate : candidates) watch.seconds(candidate);  // loads its kernel
  std::vector<double> best(candidates.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < best.size(); ++i)
      best[i] = std::min(best[i], watch.seconds(candidates[i]));
  }
  const auto least = std::min_element(best.begin(), best.end());
  return *least < kWorthLeaving * best[0] ? static_cast<std::size_t>(least - best.begin()) : 0;
}

Choices& choices(const Queue& queue) {
  static auto& machines = *new BoundedCache<int, Choices*>(1024);
  return *machines.get(queue.device().index, [&] {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, queue.device().index), queue.op(),
               "cudaGetDeviceProperties");
    return &shared_choices("cublaslt_products",
                           core::str(properties.name, ", cuBLASLt ", cublasLtGetVersion()));
  });
}

void describe(std::ostream& text, const char* name, const GemmMatrix& m) {
  text << " " << name << " " << core::name(m.dtype) << (m.transposed ? " T" : "") << " ld " << m.ld
       << " stride " << m.batch_stride << " align " << m.alignment;
}

/// All of a shape but the device's number.
std::string name_of(const GemmShape& shape) {
  std::ostringstream text;
  text << shape.batch << " x " << shape.m << " " << shape.n << " " << shape.k;
  describe(text, "a", shape.a);
  describe(text, "b", shape.b);
  describe(text, "y", shape.y);
  text << (shape.accumulate ? " accumulate" : "") << (shape.tf32 ? " tf32" : "") << " bias "
       << shape.bias << " activation " << static_cast<int>(shape.activation);
  return text.str();
}

constexpr char kDigits[] = "0123456789abcdef";

/// An algorithm may be copied as its bytes and used again by the same version (cuBLASLt's manual,
/// cublasLtMatmulAlgo_t).
std::string as_text(const cublasLtMatmulAlgo_t& algorithm) {
  std::array<unsigned char, sizeof(algorithm)> bytes{};
  std::memcpy(bytes.data(), &algorithm, bytes.size());
  std::string text;
  for (const unsigned char byte : bytes) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

/// The algorithm, where this library takes it for the problem.
std::optional<Algorithm> from_text(const Queue& queue, const Problem& problem,
                                   const std::string& text) {
  std::array<unsigned char, sizeof(cublasLtMatmulAlgo_t)> bytes{};
  if (text.size() != 2 * bytes.size() || text.find_first_not_of(kDigits) != std::string::npos)
    return {};
  const auto digit = [&](std::size_t i) {
    return static_cast<unsigned>(std::strchr(kDigits, text[i]) - kDigits);
  };
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<unsigned char>(digit(2 * i) << 4 | digit(2 * i + 1));
  Algorithm algorithm;
  std::memcpy(&algorithm.algorithm, bytes.data(), bytes.size());
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle_for(queue), problem.operation.get(), problem.first.get(), problem.second.get(),
      problem.result.get(), problem.result.get(), &algorithm.algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspaceBytes) return {};
  algorithm.workspace = result.workspaceSize;
  return algorithm;
}

/// The one that was timed here or before goes first; the others stay behind it, should it refuse.
Algorithms timed(const Queue& queue, const GemmShape& shape, const Problem& problem,
                 Algorithms candidates) {
  Choices& kept = choices(queue);
  const std::string work = name_of(shape);
  std::optional<std::string> way = kept.find(work);
  if (!way) {
    const std::size_t best = fastest(queue, shape, problem, candidates);
    way = kept.keep(work, as_text(candidates[best].algorithm));
    log::debug("cuBLASLt, {}: algorithm {} of {} proposed", work, best + 1, candidates.size());
  }
  if (const auto chosen = from_text(queue, problem, *way)) {
    candidates.insert(candidates.begin(), *chosen);
  } else {
    log::warn(
        "cuBLASLt, {}: the algorithm chosen before is none of this version's; takes its first "
        "proposal, which may round otherwise",
        work);
  }
  return candidates;
}

bool worth_timing(const Queue& queue, const GemmShape& shape, const Algorithms& candidates) {
  return candidates.size() > 1 && multiplications(shape) >= kWorthTiming &&
         product_setting() == kTimeProducts && !queue.capturing();
}

}  // namespace

std::shared_ptr<const Algorithms> algorithms_for(const Queue& queue, const GemmShape& shape,
                                                 const Problem& problem) {
  using Key = std::pair<std::uint64_t, GemmShape>;  // a setting that changed asks anew
  static auto& known = *new BoundedCache<Key, std::shared_ptr<const Algorithms>>(kKeptShapes);
  return known.get({product_setting_epoch(), shape}, [&] {
    Algorithms candidates = proposed(queue, shape, problem);
    if (worth_timing(queue, shape, candidates))
      candidates = timed(queue, shape, problem, std::move(candidates));
    return std::make_shared<const Algorithms>(std::move(candidates));
  });
}

}  // namespace cairn::kernels::cuda
