#include "cuda/cublaslt/algorithms.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "cairn/core/log.h"
#include "choices.h"
#include "cuda/bounded_cache.h"
#include "cuda/error.h"
#include "cuda/shape_class.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {

namespace {

using Algorithms = std::vector<Algorithm>;

constexpr std::size_t kWorkspaceBytes = 32u << 20;  // the most an algorithm may take, per stream
constexpr std::size_t kKeptShapes = 4096;
constexpr int kMostAlgorithms = 8;
constexpr double kWorthTiming = 1 << 20;  // multiplications; below, a launch is all there is
constexpr double kWorthLeaving = 0.97;    // of the first proposal's time: less is as likely noise
constexpr int kRounds = 4;                // the first loads kernels and does not count

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

/// Points in the queue's stream, and the device's time between them.
class Marks {
 public:
  Marks(const Queue& queue, std::size_t count) : queue_(queue) {
    for (std::size_t i = 0; i < count; ++i) {
      cudaEvent_t event = nullptr;
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDefault), queue.op(),
                 "cudaEventCreateWithFlags");
      events_.push_back(event);
    }
  }
  ~Marks() {
    for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  void set(std::size_t i) const {
    check_cuda(cudaEventRecord(events_[i], static_cast<cudaStream_t>(queue_.stream())), queue_.op(),
               "cudaEventRecord");
  }
  void wait_for_last() const {
    check_cuda(cudaEventSynchronize(events_.back()), queue_.op(), "cudaEventSynchronize");
  }
  float time_before(std::size_t i) const {
    float milliseconds = 0.0f;
    check_cuda(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]), queue_.op(),
               "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  const Queue& queue_;
  std::vector<cudaEvent_t> events_;
};

/// In turn, so that what else the GPU does falls on all; the best of each counts. The host waits
/// once.
std::size_t fastest(const Queue& queue, const GemmShape& shape, const Problem& problem,
                    const Algorithms& candidates) {
  std::shared_ptr<core::Storage> scratch;
  if (shape.accumulate)
    scratch = queue.workspace(extent(shape));  // else y is written anew after it
  void* const y = scratch ? scratch->data() : problem.pointers.y;
  const std::size_t count = candidates.size();
  std::vector<bool> refused(count, false);
  const Marks marks(queue, kRounds * count + 1);
  marks.set(0);
  for (std::size_t run = 0; run < kRounds * count; ++run) {
    const std::size_t i = run % count;
    if (!refused[i]) {
      const cublasStatus_t status = problem.run(queue, candidates[i], y);
      refused[i] = status == CUBLAS_STATUS_NOT_SUPPORTED;
      if (!refused[i]) check_cublaslt(status, queue, "cublasLtMatmul");
    }
    marks.set(run + 1);
  }
  marks.wait_for_last();
  std::vector<float> best(count, std::numeric_limits<float>::infinity());
  for (std::size_t run = count; run < kRounds * count; ++run) {
    const std::size_t i = run % count;
    if (!refused[i]) best[i] = std::min(best[i], marks.time_before(run + 1));
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
  text << " " << name << " " << core::name(m.dtype) << (m.transposed ? " T" : "") << " align "
       << m.alignment;
}

/// What products have in common that one timing serves: lengths that change from step to step are
/// of a few classes.
std::string name_of(const GemmShape& shape) {
  std::ostringstream text;
  text << class_of(shape.batch) << " x " << class_of(shape.m) << " " << class_of(shape.n) << " "
       << class_of(shape.k);
  describe(text, "a", shape.a);
  describe(text, "b", shape.b);
  describe(text, "y", shape.y);
  text << (shape.accumulate ? " accumulate" : "") << (shape.tf32 ? " tf32" : "") << " bias "
       << shape.bias << " activation " << static_cast<int>(shape.activation);
  return text.str();
}

constexpr char kDigits[] = "0123456789abcdef";

/// An algorithm may be copied as its bytes and used again by the same version, for whatever
/// cublasLtMatmulAlgoCheck takes it (cuBLASLt's manual, cublasLtMatmulAlgo_t).
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
        "cuBLASLt, {}: the algorithm chosen before is none for this product ([{}, {}, {}]) in this "
        "version; takes its first proposal, which may round otherwise",
        work, shape.m, shape.n, shape.k);
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
