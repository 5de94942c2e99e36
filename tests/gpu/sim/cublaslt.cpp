// cuBLASLt: products computed in double when their work runs, and the documented rules checked when
// they are called. What the library answers with a status is answered so (the descriptors' part was
// compared with the real one, which makes them without a GPU); what it leaves undefined is
// reported.
//
// Faults of its own: a heuristic that is injected -1 succeeds with no algorithm.
#include <cublasLt.h>

#include <set>
#include <tuple>

#include "gpu/sim/capture.h"
#include "gpu/sim/cublaslt_problem.h"
#include "gpu/sim/cublaslt_product.h"
#include "gpu/sim/elements.h"
#include "gpu/sim/machine.h"
#include "gpu/sim/vendor_object.h"

struct cublasLtContext {
  int device = 0;
};

namespace cairn::gpusim::cublaslt {
namespace {

constexpr const char* kContract = "cublasLt contract";
constexpr std::uint64_t kWorkspaceAlignment = 256;  // cublasLtMatmul: "Must be 256B aligned"

struct Preference : cublasLtMatmulPreferenceOpaque_t {
  std::uint64_t workspace = 0;
  std::uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C and D
};

/// All live objects of the library.
struct Library {
  Objects<cublasLtContext> handles{"cublasLt handle"};
  Objects<Layout> layouts{"matrix layout"};
  Objects<Operation> operations{"matmul descriptor"};
  Objects<Preference> preferences{"matmul preference"};
  std::map<std::uint64_t, std::string> problems;  // that algorithms were chosen for, by digest
  // What cublasLtMatmulAlgoCheck has taken: an algorithm's problem, another one, and the device.
  std::set<std::tuple<std::uint64_t, std::uint64_t, int>> checked;
};

Library& library() {
  static auto& all = *new Library;
  return all;
}

struct Attribute {
  void* value = nullptr;
  std::size_t size = 0;
};

template <class T>
Attribute attribute(T& value) {
  return {&value, sizeof(value)};
}

[[noreturn]] void not_simulated(const char* what, int number) {
  report("not simulated", std::string(what) + " " + std::to_string(number));
}

Attribute find(Layout& layout, cublasLtMatrixLayoutAttribute_t which) {
  switch (which) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return attribute(layout.type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return attribute(layout.order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return attribute(layout.rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return attribute(layout.columns);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return attribute(layout.ld);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return attribute(layout.batch);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return attribute(layout.batch_stride);
    default:
      not_simulated("matrix layout attribute", which);
  }
}

Attribute find(Operation& operation, cublasLtMatmulDescAttributes_t which) {
  switch (which) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
      return attribute(operation.compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
      return attribute(operation.scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return attribute(operation.pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return attribute(operation.transposes[0]);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return attribute(operation.transposes[1]);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return attribute(operation.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return attribute(operation.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
      return attribute(operation.bias_stride);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return attribute(operation.bias_type);
    default:
      not_simulated("matmul descriptor attribute", which);
  }
}

Attribute find(Preference& preference, cublasLtMatmulPreferenceAttributes_t which) {
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return attribute(preference.workspace);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return attribute(preference.alignments[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return attribute(preference.alignments[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return attribute(preference.alignments[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return attribute(preference.alignments[3]);
    default:
      not_simulated("matmul preference attribute", which);
  }
}

cublasStatus_t set(Attribute to, const void* from, std::size_t bytes) {
  if (from == nullptr || bytes != to.size) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(to.value, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

/// With no room at all the answer is the size alone.
cublasStatus_t get(Attribute from, void* to, std::size_t bytes, std::size_t* written) {
  if (written != nullptr) *written = from.size;
  if (bytes == 0) return written != nullptr ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
  if (to == nullptr || bytes < from.size) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(to, from.value, from.size);
  return CUBLAS_STATUS_SUCCESS;
}

/// Creates an object, or answers as the library does; some take memory of the device.
template <class T, class Handle, class Init>
cublasStatus_t create(const char* name, Objects<T>& objects, Handle* out, Init init,
                      bool allocates = false) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (out == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (allocates && refuse_unsafe_call() != 0) return CUBLAS_STATUS_ALLOC_FAILED;
  T* const made = objects.make();
  init(*made);
  *out = made;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t destroy(const char* name, Objects<T>& objects, const void* object) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (object != nullptr) objects.destroy(object, call);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T, class Which>
cublasStatus_t set_attribute(const char* name, Objects<T>& objects, const void* object, Which which,
                             const void* from, std::size_t bytes) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  return set(find(objects.at(object, call), which), from, bytes);
}

template <class T, class Which>
cublasStatus_t get_attribute(const char* name, Objects<T>& objects, const void* object, Which which,
                             void* to, std::size_t bytes, std::size_t* written) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  return get(find(objects.at(object, call), which), to, bytes, written);
}

/// The same in every process: algorithms may be kept in files.
std::uint64_t digest(const std::string& text) {
  std::uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (const char byte : text) sum = (sum ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return sum;
}

std::uint64_t digest(const Problem& problem) {
  return digest(describe(problem));
}

/// What lies in a cublasLtMatmulAlgo_t; it may be copied and kept.
struct Algorithm {
  std::uint64_t made_here = 0;
  std::uint64_t problem = 0, kind = 0;  // digests of their descriptions
  std::uint64_t workspace = 0;
  std::uint32_t alignments[5] = {};  // of A, B, C, D and the bias
  std::int32_t device = 0;
};
constexpr std::uint64_t kMadeHere = 0x43756c744c734742;
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

/// Shapes with an odd size want workspace first and can do without; the others the other way
/// around.
std::vector<std::uint64_t> workspaces(const Problem& p) {
  const std::uint64_t some = 65536 + 16 * (p.m() % 97 + p.n() % 89) + p.k() % 13;
  const bool odd = ((p.m() | p.n() | p.k()) & 1) != 0;
  if (odd) return {some, 0, 2 * some};
  return {0, some, 2 * some};
}

/// What takes more workspace is faster.
double milliseconds(const Algorithm& algorithm) {
  return 1.0 / (1.0 + static_cast<double>(algorithm.workspace) / 65536);
}

cublasLtMatmulHeuristicResult_t result_of(const Algorithm& algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  std::memcpy(&result.algo, &algorithm, sizeof(algorithm));
  result.workspaceSize = algorithm.workspace;
  result.state = CUBLAS_STATUS_SUCCESS;
  result.wavesCount = 1.0f;
  return result;
}

int choose(const Problem& problem, const Preference& preference, int device, int most,
           cublasLtMatmulHeuristicResult_t* results) {
  Algorithm algorithm;
  algorithm.made_here = kMadeHere;
  algorithm.problem = digest(problem);
  algorithm.kind = digest(describe_kind(problem));
  library().problems[algorithm.problem] = describe(problem);
  std::copy(std::begin(preference.alignments), std::end(preference.alignments),
            algorithm.alignments);
  algorithm.alignments[4] = static_cast<std::uint32_t>(alignment_of(problem.operation.bias));
  algorithm.device = device;
  int count = 0;
  for (const std::uint64_t workspace : workspaces(problem)) {
    if (count == most || workspace > preference.workspace) continue;
    algorithm.workspace = workspace;
    results[count++] = result_of(algorithm);
  }
  return count;
}

void check_algorithm(const Call& call, const Algorithm& algorithm, const Problem& problem,
                     int device) {
  const std::string name = call.name();
  if (algorithm.made_here != kMadeHere)
    report(kContract, name + ": expected an algorithm from the heuristic, got other bytes");
  const std::uint64_t wanted = digest(problem);
  if (library().checked.contains({algorithm.problem, wanted, device})) return;
  if (algorithm.device != device) {
    report(kContract, name + ": expected an algorithm chosen for device " + std::to_string(device) +
                          ", or that cublasLtMatmulAlgoCheck takes there, got one for " +
                          std::to_string(algorithm.device));
  }
  if (algorithm.problem != wanted) {
    report(kContract, name + ": expected the algorithm for what it was chosen for (" +
                          library().problems[algorithm.problem] + "), got " + describe(problem));
  }
}

/// Of all rows and matrices of a batch behind an aligned address.
std::uint64_t alignment_within(const Layout& layout) {
  const std::size_t bytes = size_of(*element_of(layout.type));
  const std::uint64_t stride =
      layout.batch > 1 ? static_cast<std::uint64_t>(layout.batch_stride) * bytes : 0;
  const std::uint64_t ld = layout.columns > 1 ? static_cast<std::uint64_t>(layout.ld) * bytes : 0;
  const std::uint64_t bits = ld | stride | 256;
  return bits & (~bits + 1);
}

void check_alignments(const Call& call, const Algorithm& algorithm, const Problem& problem,
                      const Pointers& pointers) {
  const void* const data[] = {pointers.a, pointers.b, pointers.c, pointers.d, pointers.bias};
  const char* const names[] = {"A", "B", "C", "D", "the bias"};
  for (int i = 0; i < (problem.has_bias() ? 5 : 4); ++i) {
    if (alignment_of(data[i]) >= algorithm.alignments[i]) continue;
    report(kContract, std::string(call.name()) + ": expected " + names[i] + " aligned to " +
                          std::to_string(algorithm.alignments[i]) +
                          " bytes, as it was when the algorithm was chosen, got " +
                          std::to_string(alignment_of(data[i])));
  }
  const Layout* const layouts[] = {&problem.a, &problem.b, &problem.c, &problem.d};
  for (int i = 0; i < 4; ++i) {
    if (alignment_within(*layouts[i]) >= algorithm.alignments[i]) continue;
    report(kContract, std::string(call.name()) + ": expected rows and matrices of " + names[i] +
                          " aligned to the " + std::to_string(algorithm.alignments[i]) +
                          " bytes that the preference promised, got a leading dimension or batch " +
                          "stride of " + std::to_string(alignment_within(*layouts[i])));
  }
}

void check_result(const Call& call, const Problem& problem) {
  if (problem.d.batch == 1 || problem.d.batch_stride != 0) return;
  report(kContract, std::string(call.name()) +
                        ": expected the batch's results apart, got a batch stride of 0 for D");
}

template <class... Given>
bool any_null(const Given*... given) {
  return ((static_cast<const void*>(given) == nullptr) || ...);
}

/// What an algorithm leaves in its workspace is nobody's business.
void scribble(void* workspace, std::size_t bytes) {
  if (bytes > 0) std::memset(write(workspace, bytes), 0xa7, bytes);
}

}  // namespace
}  // namespace cairn::gpusim::cublaslt

using namespace cairn::gpusim;            // NOLINT: the entry points stand outside it
using namespace cairn::gpusim::cublaslt;  // NOLINT

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return create(
      "cublasLtCreate", library().handles, handle,
      [](cublasLtContext& made) { made.device = current_device(); }, true);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  return destroy("cublasLtDestroy", library().handles, handle);
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "a failure of the simulated cuBLASLt";
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  return create("cublasLtMatrixLayoutCreate", library().layouts, layout, [&](Layout& made) {
    made.type = static_cast<std::uint32_t>(type);
    made.rows = rows, made.columns = cols, made.ld = ld;
  });
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy("cublasLtMatrixLayoutDestroy", library().layouts, layout);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t which,
                                                const void* from, size_t bytes) {
  return set_attribute("cublasLtMatrixLayoutSetAttribute", library().layouts, layout, which, from,
                       bytes);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t which, void* to,
                                                size_t bytes, size_t* written) {
  return get_attribute("cublasLtMatrixLayoutGetAttribute", library().layouts, layout, which, to,
                       bytes, written);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
  return create("cublasLtMatmulDescCreate", library().operations, operation,
                [&](Operation& made) { made.compute = compute, made.scale = scale; });
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  return destroy("cublasLtMatmulDescDestroy", library().operations, operation);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t which,
                                              const void* from, size_t bytes) {
  return set_attribute("cublasLtMatmulDescSetAttribute", library().operations, operation, which,
                       from, bytes);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t which, void* to,
                                              size_t bytes, size_t* written) {
  return get_attribute("cublasLtMatmulDescGetAttribute", library().operations, operation, which, to,
                       bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create("cublasLtMatmulPreferenceCreate", library().preferences, preference,
                [](Preference&) {});
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy("cublasLtMatmulPreferenceDestroy", library().preferences, preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void* from, size_t bytes) {
  return set_attribute("cublasLtMatmulPreferenceSetAttribute", library().preferences, preference,
                       which, from, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    void* to, size_t bytes, size_t* written) {
  return get_attribute("cublasLtMatmulPreferenceGetAttribute", library().preferences, preference,
                       which, to, bytes, written);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  const Call call("cublasLtMatmulAlgoGetHeuristic");
  if (returned != nullptr) *returned = 0;
  if (call.injected() == -1) return CUBLAS_STATUS_SUCCESS;
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (any_null(operation, a, b, c, d, preference, results, returned))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  Library& all = library();
  const int device = all.handles.at(handle, call).device;
  check_devices(kContract, call, device, current_device());
  const Problem problem{all.operations.at(operation, call), all.layouts.at(a, call),
                        all.layouts.at(b, call), all.layouts.at(c, call), all.layouts.at(d, call)};
  if (const cublasStatus_t status = check(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  *returned = choose(problem, all.preferences.at(preference, call), device, requested, results);
  return *returned > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  const Call call("cublasLtMatmulAlgoCheck");
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (any_null(operation, a, b, c, d, algo, result)) return CUBLAS_STATUS_INVALID_VALUE;
  Library& all = library();
  const Problem problem{all.operations.at(operation, call), all.layouts.at(a, call),
                        all.layouts.at(b, call), all.layouts.at(c, call), all.layouts.at(d, call)};
  if (const cublasStatus_t status = check(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm;
  std::memcpy(static_cast<void*>(&algorithm), algo, sizeof(algorithm));
  const bool known =
      algorithm.made_here == kMadeHere && algorithm.kind == digest(describe_kind(problem));
  if (!known) return CUBLAS_STATUS_INVALID_VALUE;
  const int device = all.handles.at(handle, call).device;
  all.checked.insert({algorithm.problem, digest(problem), device});
  *result = result_of(algorithm);
  return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void* alpha, const void* A, cublasLtMatrixLayout_t a,
                              const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  const Call call("cublasLtMatmul");
  if (call.injected() != 0) return static_cast<cublasStatus_t>(call.injected());
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (any_null(operation, alpha, A, a, B, b, beta, C, c, D, d)) return CUBLAS_STATUS_INVALID_VALUE;
  if (algo == nullptr) report("not simulated", "cublasLtMatmul without an algorithm");
  check_bound_context(kContract, call);
  Library& all = library();
  Stream* const queue = find_stream(stream);
  if (queue == nullptr) report(kContract, "cublasLtMatmul: expected a live stream, got another");
  const int device = all.handles.at(handle, call).device;
  check_devices(kContract, call, device, device_of(*queue));
  const Problem problem{all.operations.at(operation, call), all.layouts.at(a, call),
                        all.layouts.at(b, call), all.layouts.at(c, call), all.layouts.at(d, call)};
  if (const cublasStatus_t status = check(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  const Pointers pointers{A, B, C, D, problem.operation.bias};
  if (problem.has_bias() && pointers.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  Algorithm algorithm;
  std::memcpy(static_cast<void*>(&algorithm), algo, sizeof(algorithm));
  check_algorithm(call, algorithm, problem, device);
  check_alignments(call, algorithm, problem, pointers);
  check_result(call, problem);
  if (workspace_bytes < algorithm.workspace) return CUBLAS_STATUS_INVALID_VALUE;
  if (algorithm.workspace > 0)
    check_workspace(kContract, call, workspace, workspace_bytes, kWorkspaceAlignment);
  const double scales[] = {scalar_at(alpha, problem.wide(), kContract, call),
                           scalar_at(beta, problem.wide(), kContract, call)};
  const auto multiply = [=] {
    scribble(workspace, algorithm.workspace);
    for (int i = 0; i < problem.d.batch; ++i)
      multiply_one(problem, pointers, scales[0], scales[1], i);
  };
  enqueue_kernel(call, *queue, multiply, milliseconds(algorithm));
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
