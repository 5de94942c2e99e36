// cuDNN: convolutions computed in double when their work runs, and the documented rules checked
// when they are called. What the library answers with a status is answered so (the descriptors'
// part was compared with the real one, which makes them without a GPU); what it leaves undefined is
// reported.
//
// Stricter than the library: a search lists algorithms that are not deterministic or not supported
// first, and workspace sizes that hold for another math type; grouped f32 convolutions exist for
// row-major storage only; f32 under a math type that allows TF32 is computed in TF32.
#include <cudnn.h>

#include <array>
#include <atomic>
#include <cmath>
#include <thread>

#include "gpu/sim/elements.h"
#include "gpu/sim/machine.h"
#include "gpu/sim/vendor_object.h"

struct cudnnContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::thread::id thread = std::this_thread::get_id();  // that made it or set its stream last
  std::atomic<int> users = 0;
  bool destroyed = false;  // its memory is never freed, so that late users find it
};

struct cudnnTensorStruct {
  cudnnTensorFormat_t format = CUDNN_TENSOR_NCHW;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::array<int, 4> sizes{};  // N, C, H, W; zeros: not set yet
};

struct cudnnFilterStruct : cudnnTensorStruct {};

struct cudnnConvolutionStruct {
  std::array<int, 2> padding{}, stride{}, dilation{};
  int groups = 1;
  cudnnDataType_t compute = CUDNN_DATA_FLOAT;
  cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};

namespace cairn::gpusim {
namespace {

constexpr const char* kContract = "cudnn contract";
constexpr std::uint64_t kAlignment = 16;  // of images, weights and workspace: what kernels load
constexpr std::int64_t kTooMany = std::int64_t{1} << 31;  // "limited to 2 Giga-elements"

using Tensor = cudnnTensorStruct;

struct Library {
  Objects<cudnnTensorStruct> tensors{"tensor descriptor"};
  Objects<cudnnFilterStruct> filters{"filter descriptor"};
  Objects<cudnnConvolutionStruct> convolutions{"convolution descriptor"};
};

Library& library() {
  static auto& all = *new Library;
  return all;
}

/// A handle in use by this thread; it serves one at a time.
class InUse {
 public:
  InUse(cudnnHandle_t handle, const char* name) : handle_(handle) {
    if (handle_->users.fetch_add(1) == 0) return;
    report(kContract, std::string(name) +
                          ": expected a handle that serves one thread at a time, got one that "
                          "another thread is calling with");
  }
  ~InUse() { handle_->users.fetch_sub(1); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  cudnnHandle_t handle_;
};

void check_alive(const Call& call, const cudnnContext& handle) {
  if (!handle.destroyed) return;
  report("use after destroy",
         std::string(call.name()) + ": expected a live cudnn handle, got one that was destroyed");
}

/// The handle's stream, once the handle has been found fit for use here.
Stream& queue_of(const Call& call, const cudnnContext& handle) {
  check_alive(call, handle);
  Stream* const stream = find_stream(handle.stream);
  if (stream == nullptr) {
    report(kContract, std::string(call.name()) +
                          ": expected a handle with a live stream, got one whose stream is gone");
  }
  check_devices(kContract, call, handle.device, device_of(*stream));
  if (handle.thread != std::this_thread::get_id()) {
    report(kContract, std::string(call.name()) +
                          ": expected the thread that set the handle's stream, got another one");
  }
  return *stream;
}

std::int64_t count_of(const Tensor& tensor) {
  std::int64_t count = 1;
  for (const int size : tensor.sizes) count *= size;
  return count;
}

/// Like count_of, but a product that a 64-bit integer cannot hold is too many as well.
bool has_too_many(const std::array<int, 4>& sizes) {
  std::int64_t count = 1;
  for (const int size : sizes) {
    count *= size;
    if (count >= kTooMany) return true;
  }
  return false;
}

bool all_positive(const std::array<int, 4>& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int size) { return size > 0; });
}

bool is_known(cudnnTensorFormat_t format) {
  return format == CUDNN_TENSOR_NCHW || format == CUDNN_TENSOR_NHWC;
}

Element element_of(const Tensor& tensor) {
  if (tensor.type == CUDNN_DATA_HALF) return Element::f16;
  return tensor.type == CUDNN_DATA_BFLOAT16 ? Element::bf16 : Element::f32;
}

enum class Pass { forward, backward_data, backward_filter };

/// A convolution as the descriptors tell it: y from x and w, whatever is computed of the three.
struct Problem {
  Pass pass;
  Tensor x, w, y;
  cudnnConvolutionStruct how;
};

int output_size(const Problem& p, int axis) {
  const auto i = static_cast<std::size_t>(axis);
  const int reach = p.how.dilation[i] * (p.w.sizes[i + 2] - 1) + 1;
  return (p.x.sizes[i + 2] + 2 * p.how.padding[i] - reach) / p.how.stride[i] + 1;
}

bool is_consistent(const Problem& p) {
  if (!all_positive(p.x.sizes) || !all_positive(p.w.sizes) || !all_positive(p.y.sizes) ||
      p.how.stride[0] < 1)  // descriptors that nobody set
    return false;
  const bool channels = p.x.sizes[1] == p.w.sizes[1] * p.how.groups &&
                        p.w.sizes[0] % p.how.groups == 0 && p.y.sizes[1] == p.w.sizes[0];
  return channels && p.y.sizes[0] == p.x.sizes[0] && p.y.sizes[2] == output_size(p, 0) &&
         p.y.sizes[3] == output_size(p, 1);
}

bool is_supported(const Problem& p) {
  const bool types = p.w.type == p.x.type && p.y.type == p.x.type &&
                     p.how.compute == CUDNN_DATA_FLOAT &&
                     (p.x.type == CUDNN_DATA_FLOAT || p.x.type == CUDNN_DATA_HALF ||
                      p.x.type == CUDNN_DATA_BFLOAT16);
  const bool formats = p.w.format == p.x.format && p.y.format == p.x.format;
  const bool grouped =
      p.how.groups > 1 && p.x.format == CUDNN_TENSOR_NHWC && p.x.type == CUDNN_DATA_FLOAT;
  return types && formats && !grouped && !has_too_many(p.w.sizes);
}

cudnnStatus_t check(const Problem& p) {
  if (!is_consistent(p)) return CUDNN_STATUS_BAD_PARAM;
  return is_supported(p) ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
}

/// One algorithm of a pass, as a search lists it.
struct Algorithm {
  int number;
  bool deterministic;
  bool supported;
  bool wants_workspace;
};

bool is_three_by_three(const Problem& p) {
  return p.w.sizes[2] == 3 && p.w.sizes[3] == 3 && p.how.groups == 1 &&
         p.how.stride == std::array{1, 1} && p.how.dilation == std::array{1, 1};
}

std::vector<Algorithm> algorithms(const Problem& p) {
  const bool winograd = is_three_by_three(p);
  switch (p.pass) {
    case Pass::forward:
      return {{CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, true, winograd, true},
              {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, true, true, true},
              {CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, true, true, false},
              {CUDNN_CONVOLUTION_FWD_ALGO_DIRECT, true, false, false}};
    case Pass::backward_data:
      return {{CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, false, true, false},
              {CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED, true, winograd, true},
              {CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, true, true, true}};
    case Pass::backward_filter:
      break;
  }
  return {{CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, false, true, false},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3, false, true, true},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED, true, winograd, true},
          {CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, true, true, true}};
}

/// What the algorithm needs under the descriptor's math type.
std::size_t workspace_of(const Problem& p, const Algorithm& algorithm) {
  if (!algorithm.wants_workspace) return 0;
  const auto odd = static_cast<std::size_t>(p.x.sizes[2] % 7 + p.w.sizes[0] % 5);
  const std::size_t more = p.how.math == CUDNN_FMA_MATH ? 0 : 8192;
  return 16384 + 48 * odd + 1024 * static_cast<std::size_t>(algorithm.number) + more;
}

/// With tensor operations allowed, half convolutions use them; f32's may then use TF32.
cudnnMathType_t math_of(const Problem& p) {
  if (p.how.math == CUDNN_FMA_MATH) return CUDNN_FMA_MATH;
  return p.x.type == CUDNN_DATA_FLOAT ? CUDNN_DEFAULT_MATH : CUDNN_TENSOR_OP_MATH;
}

template <class Result>
Result listed(const Problem& p, const Algorithm& algorithm) {
  Problem plain = p;
  plain.how.math = CUDNN_FMA_MATH;
  Result result{};
  result.algo = static_cast<decltype(result.algo)>(algorithm.number);
  result.status = algorithm.supported ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
  result.time = -1.0f;
  result.memory = workspace_of(plain, algorithm);
  result.determinism = algorithm.deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
  result.mathType = math_of(p);
  return result;
}

template <class... Given>
bool any_null(const Given*... given) {
  return ((static_cast<const void*>(given) == nullptr) || ...);
}

Problem problem_of(const Call& call, Pass pass, cudnnTensorDescriptor_t x,
                   cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t how,
                   cudnnTensorDescriptor_t y) {
  Library& all = library();
  return {pass, all.tensors.at(x, call), all.filters.at(w, call), all.tensors.at(y, call),
          all.convolutions.at(how, call)};
}

template <class Result>
cudnnStatus_t search(const char* name, Pass pass, cudnnHandle_t handle, cudnnTensorDescriptor_t x,
                     cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t how,
                     cudnnTensorDescriptor_t y, int requested, int* returned, Result* results) {
  if (any_null(handle, x, w, how, y, returned, results) || requested < 1)
    return CUDNN_STATUS_BAD_PARAM;
  const InUse use(handle, name);
  const Call call(name);
  *returned = 0;
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  queue_of(call, *handle);
  const Problem problem = problem_of(call, pass, x, w, how, y);
  if (const cudnnStatus_t status = check(problem); status != CUDNN_STATUS_SUCCESS) return status;
  for (const Algorithm& algorithm : algorithms(problem)) {
    if (*returned == requested) break;
    results[(*returned)++] = listed<Result>(problem, algorithm);
  }
  return CUDNN_STATUS_SUCCESS;
}

const Algorithm* find(const std::vector<Algorithm>& all, int number) {
  for (const Algorithm& algorithm : all) {
    if (algorithm.number == number && algorithm.supported) return &algorithm;
  }
  return nullptr;
}

cudnnStatus_t workspace_size(const char* name, Pass pass, cudnnHandle_t handle,
                             cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                             cudnnConvolutionDescriptor_t how, cudnnTensorDescriptor_t y,
                             int number, std::size_t* bytes) {
  if (any_null(handle, x, w, how, y, bytes)) return CUDNN_STATUS_BAD_PARAM;
  const InUse use(handle, name);
  const Call call(name);
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  queue_of(call, *handle);
  const Problem problem = problem_of(call, pass, x, w, how, y);
  if (const cudnnStatus_t status = check(problem); status != CUDNN_STATUS_SUCCESS) return status;
  const auto all = algorithms(problem);
  const Algorithm* const algorithm = find(all, number);
  if (algorithm == nullptr) return CUDNN_STATUS_NOT_SUPPORTED;
  *bytes = workspace_of(problem, *algorithm);
  return CUDNN_STATUS_SUCCESS;
}

/// An element's place in memory, from its place in row-major order.
class Places {
 public:
  explicit Places(const Tensor& tensor) : tensor_(tensor) {}

  std::size_t operator()(std::size_t n, std::size_t c, std::size_t pixel) const {
    const auto channels = static_cast<std::size_t>(tensor_.sizes[1]), pixels = this->pixels();
    const bool last = tensor_.format == CUDNN_TENSOR_NHWC;
    return last ? (n * pixels + pixel) * channels + c : (n * channels + c) * pixels + pixel;
  }
  std::size_t pixels() const {
    return static_cast<std::size_t>(tensor_.sizes[2]) * static_cast<std::size_t>(tensor_.sizes[3]);
  }

 private:
  const Tensor& tensor_;
};

/// Calls each(row-major index, index in memory).
template <class Each>
void for_elements(const Tensor& tensor, Each each) {
  const Places places(tensor);
  std::size_t i = 0;
  for (int n = 0; n < tensor.sizes[0]; ++n) {
    for (int c = 0; c < tensor.sizes[1]; ++c) {
      for (std::size_t pixel = 0; pixel < places.pixels(); ++pixel, ++i)
        each(i, places(static_cast<std::size_t>(n), static_cast<std::size_t>(c), pixel));
    }
  }
}

using Values = std::vector<double>;  // row-major

Values load_tensor(const Tensor& tensor, const void* data) {
  const Element element = element_of(tensor);
  const std::size_t size = size_of(element), count = static_cast<std::size_t>(count_of(tensor));
  const auto* bytes = static_cast<const char*>(read(data, count * size));
  Values values(count);
  for_elements(tensor, [&](std::size_t i, std::size_t place) {
    values[i] = load(element, bytes + place * size);
  });
  return values;
}

Values load_factor(const Problem& p, const Tensor& tensor, const void* data) {
  Values values = load_tensor(tensor, data);
  if (tensor.type == CUDNN_DATA_FLOAT && p.how.math != CUDNN_FMA_MATH) {
    for (double& value : values) value = to_tf32(value);
  }
  return values;
}

void store_tensor(const Tensor& tensor, void* data, const Values& values) {
  const Element element = element_of(tensor);
  const std::size_t size = size_of(element);
  auto* bytes = static_cast<char*>(write(data, values.size() * size));
  for_elements(tensor, [&](std::size_t i, std::size_t place) {
    store(element, bytes + place * size, values[i]);
  });
}

/// The first and one past the last output whose input, offset - padding + stride o, is inside.
std::array<int, 2> inside(int offset, int stride, int size, int outputs) {
  const int first = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
  const int last = offset >= size ? 0 : (size - 1 - offset) / stride + 1;
  return {first, std::min(last, outputs)};
}

/// Calls term(index in y, index in x, index in w) for every product of the convolution.
template <class Term>
void for_terms(const Problem& p, Term term) {
  const auto& [N, O, OH, OW] = p.y.sizes;
  const auto& [I, kH, kW] = std::array{p.w.sizes[1], p.w.sizes[2], p.w.sizes[3]};
  const int C = p.x.sizes[1], H = p.x.sizes[2], W = p.x.sizes[3];
  const auto at = [](int a, int size, int b) { return std::int64_t{a} * size + b; };
  const auto row = [&](std::int64_t map, std::int64_t x_map, std::int64_t w_map, int kh, int kw) {
    const int down = kh * p.how.dilation[0] - p.how.padding[0];
    const int along = kw * p.how.dilation[1] - p.how.padding[1];
    const auto [top, bottom] = inside(down, p.how.stride[0], H, OH);
    const auto [left, right] = inside(along, p.how.stride[1], W, OW);
    const std::int64_t w = (w_map * kH + kh) * kW + kw;
    for (int oh = top; oh < bottom; ++oh) {
      const std::int64_t y = (map * OH + oh) * OW;
      const std::int64_t x = (x_map * H + oh * p.how.stride[0] + down) * W + along;
      for (int ow = left; ow < right; ++ow) term(y + ow, x + ow * p.how.stride[1], w);
    }
  };
  for (int n = 0; n < N; ++n) {
    for (int o = 0; o < O; ++o) {
      const int first = o / (O / p.how.groups) * I;  // channel of the group
      for (int i = 0; i < I; ++i) {
        for (int tap = 0; tap < kH * kW; ++tap)
          row(at(n, O, o), at(n, C, first + i), at(o, I, i), tap / kW, tap % kW);
      }
    }
  }
}

const Tensor& result_of(const Problem& p) {
  if (p.pass == Pass::forward) return p.y;
  return p.pass == Pass::backward_data ? p.x : p.w;
}

/// The images and weight of a call; which one is written depends on the pass.
struct Pointers {
  void *x, *w, *y;
};

Values compute(const Problem& p, const Pointers& data) {
  Values result(static_cast<std::size_t>(count_of(result_of(p))), 0.0);
  const auto load = [&](const Tensor& tensor, const void* from) {
    return &tensor == &result_of(p) ? Values() : load_factor(p, tensor, from);
  };
  const Values x = load(p.x, data.x), w = load(p.w, data.w), y = load(p.y, data.y);
  const auto u = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  switch (p.pass) {
    case Pass::forward:
      for_terms(p, [&](auto iy, auto ix, auto iw) { result[u(iy)] += x[u(ix)] * w[u(iw)]; });
      break;
    case Pass::backward_data:
      for_terms(p, [&](auto iy, auto ix, auto iw) { result[u(ix)] += y[u(iy)] * w[u(iw)]; });
      break;
    case Pass::backward_filter:
      for_terms(p, [&](auto iy, auto ix, auto iw) { result[u(iw)] += x[u(ix)] * y[u(iy)]; });
      break;
  }
  return result;
}

void run(const Problem& p, const Pointers& data, double alpha, double beta) {
  Values result = compute(p, data);
  void* const target = p.pass == Pass::forward         ? data.y
                       : p.pass == Pass::backward_data ? data.x
                                                       : data.w;
  for (double& value : result) value *= alpha;
  if (beta != 0.0) {
    const Values before = load_tensor(result_of(p), target);
    for (std::size_t i = 0; i < result.size(); ++i) result[i] += beta * before[i];
  }
  store_tensor(result_of(p), target, result);
}

void check_alignment(const Call& call, const Pointers& pointers) {
  for (const void* data : {pointers.x, pointers.w, pointers.y}) {
    if (alignment_of(data) >= kAlignment) continue;
    report(kContract, std::string(call.name()) + ": expected images and weight aligned to " +
                          std::to_string(kAlignment) + " bytes, got one aligned to " +
                          std::to_string(alignment_of(data)));
  }
}

/// What a call of a pass gets besides descriptors and memory.
struct Given {
  const void *alpha, *beta;
  int algorithm;
  void* workspace;
  std::size_t workspace_bytes;
};

cudnnStatus_t convolve(const char* name, Pass pass, cudnnHandle_t handle, cudnnTensorDescriptor_t x,
                       cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t how,
                       cudnnTensorDescriptor_t y, const Pointers& pointers, const Given& given) {
  if (any_null(handle, x, w, how, y, pointers.x, pointers.w, pointers.y, given.alpha, given.beta))
    return CUDNN_STATUS_BAD_PARAM;
  const InUse use(handle, name);
  const Call call(name);
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  Stream& queue = queue_of(call, *handle);
  const Problem problem = problem_of(call, pass, x, w, how, y);
  if (const cudnnStatus_t status = check(problem); status != CUDNN_STATUS_SUCCESS) return status;
  const auto all = algorithms(problem);
  const Algorithm* const algorithm = find(all, given.algorithm);
  if (algorithm == nullptr) return CUDNN_STATUS_NOT_SUPPORTED;
  const std::size_t needed = workspace_of(problem, *algorithm);
  if (needed > given.workspace_bytes || (needed > 0 && given.workspace == nullptr))
    return CUDNN_STATUS_BAD_PARAM;
  check_alignment(call, pointers);
  if (needed > 0)
    check_workspace(kContract, call, given.workspace, given.workspace_bytes, kAlignment);
  const double alpha = scalar_at(given.alpha, false, kContract, call);
  const double beta = scalar_at(given.beta, false, kContract, call);
  void* const workspace = given.workspace;
  enqueue_kernel(call, queue, [=] {
    if (needed > 0) std::memset(write(workspace, needed), 0xa7, needed);
    run(problem, pointers, alpha, beta);
  });
  return CUDNN_STATUS_SUCCESS;
}

template <class T>
cudnnStatus_t create(const char* name, Objects<T>& objects, T** out) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (out == nullptr) return CUDNN_STATUS_BAD_PARAM;
  *out = objects.make();
  return CUDNN_STATUS_SUCCESS;
}

template <class T>
cudnnStatus_t destroy(const char* name, Objects<T>& objects, const T* object) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (object != nullptr) objects.destroy(object, call);
  return CUDNN_STATUS_SUCCESS;
}

void* writable(const void* data) {
  return const_cast<void*>(data);
}

}  // namespace
}  // namespace cairn::gpusim

using namespace cairn::gpusim;  // NOLINT: the entry points stand outside it

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  const Call call("cudnnCreate");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  *handle = new cudnnContext;
  (*handle)->device = current_device();
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  const InUse use(handle, "cudnnDestroy");
  const Call call("cudnnDestroy");
  check_alive(call, *handle);
  handle->destroyed = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  const InUse use(handle, "cudnnSetStream");
  const Call call("cudnnSetStream");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  handle->stream = stream;
  handle->thread = std::this_thread::get_id();
  queue_of(call, *handle);
  return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion() {
  return CUDNN_VERSION;
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (CUDNN_STATUS_CATEGORY(status)) {
    case CUDNN_STATUS_SUCCESS:
      return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM:
      return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED:
      return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_EXECUTION_FAILED:
      return "CUDNN_STATUS_EXECUTION_FAILED";
    default:
      return "CUDNN_STATUS_INTERNAL_ERROR";
  }
}

void cudnnGetLastErrorString(char* message, size_t size) {
  if (message != nullptr && size > 0) message[0] = '\0';
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* tensor) {
  return create("cudnnCreateTensorDescriptor", library().tensors, tensor);
}

cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensor) {
  return destroy("cudnnDestroyTensorDescriptor", library().tensors, tensor);
}

cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t tensor, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w) {
  const Call call("cudnnSetTensor4dDescriptor");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  const std::array sizes{n, c, h, w};
  if (tensor == nullptr || !is_known(format) || !all_positive(sizes)) return CUDNN_STATUS_BAD_PARAM;
  if (has_too_many(sizes)) return CUDNN_STATUS_NOT_SUPPORTED;
  library().tensors.at(tensor, call) = {format, type, sizes};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* filter) {
  return create("cudnnCreateFilterDescriptor", library().filters, filter);
}

cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t filter) {
  return destroy("cudnnDestroyFilterDescriptor", library().filters, filter);
}

/// Takes any sizes, as the library does; one that is too large is refused by the search.
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t filter, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w) {
  const Call call("cudnnSetFilter4dDescriptor");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  const std::array sizes{k, c, h, w};
  if (filter == nullptr || !is_known(format) || !all_positive(sizes)) return CUDNN_STATUS_BAD_PARAM;
  library().filters.at(filter, call) = cudnnFilterStruct{{format, type, sizes}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* convolution) {
  return create("cudnnCreateConvolutionDescriptor", library().convolutions, convolution);
}

cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t convolution) {
  return destroy("cudnnDestroyConvolutionDescriptor", library().convolutions, convolution);
}

cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t convolution, int pad_h,
                                              int pad_w, int u, int v, int dilation_h,
                                              int dilation_w, cudnnConvolutionMode_t mode,
                                              cudnnDataType_t compute) {
  const Call call("cudnnSetConvolution2dDescriptor");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  const bool good = pad_h >= 0 && pad_w >= 0 && u > 0 && v > 0 && dilation_h > 0 && dilation_w > 0;
  if (convolution == nullptr || !good) return CUDNN_STATUS_BAD_PARAM;
  if (mode != CUDNN_CROSS_CORRELATION) report("not simulated", "a flipped convolution");
  auto& set = library().convolutions.at(convolution, call);
  set.padding = {pad_h, pad_w}, set.stride = {u, v}, set.dilation = {dilation_h, dilation_w};
  set.mode = mode, set.compute = compute;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t convolution, int groups) {
  const Call call("cudnnSetConvolutionGroupCount");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (convolution == nullptr || groups < 1) return CUDNN_STATUS_BAD_PARAM;
  library().convolutions.at(convolution, call).groups = groups;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t convolution,
                                          cudnnMathType_t math) {
  const Call call("cudnnSetConvolutionMathType");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (convolution == nullptr || math < CUDNN_DEFAULT_MATH || math > CUDNN_FMA_MATH)
    return CUDNN_STATUS_BAD_PARAM;
  library().convolutions.at(convolution, call).math = math;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
    const cudnnConvolutionDescriptor_t how, const cudnnTensorDescriptor_t y, const int requested,
    int* returned, cudnnConvolutionFwdAlgoPerf_t* results) {
  return search("cudnnGetConvolutionForwardAlgorithm_v7", Pass::forward, handle, x, w, how, y,
                requested, returned, results);
}

cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t how, const cudnnTensorDescriptor_t dx, const int requested,
    int* returned, cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return search("cudnnGetConvolutionBackwardDataAlgorithm_v7", Pass::backward_data, handle, dx, w,
                how, dy, requested, returned, results);
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t how, const cudnnFilterDescriptor_t dw, const int requested,
    int* returned, cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return search("cudnnGetConvolutionBackwardFilterAlgorithm_v7", Pass::backward_filter, handle, x,
                dw, how, dy, requested, returned, results);
}

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
    const cudnnConvolutionDescriptor_t how, const cudnnTensorDescriptor_t y,
    cudnnConvolutionFwdAlgo_t algorithm, size_t* bytes) {
  return workspace_size("cudnnGetConvolutionForwardWorkspaceSize", Pass::forward, handle, x, w, how,
                        y, algorithm, bytes);
}

cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t how, const cudnnTensorDescriptor_t dx,
    cudnnConvolutionBwdDataAlgo_t algorithm, size_t* bytes) {
  return workspace_size("cudnnGetConvolutionBackwardDataWorkspaceSize", Pass::backward_data, handle,
                        dx, w, how, dy, algorithm, bytes);
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t how, const cudnnFilterDescriptor_t dw,
    cudnnConvolutionBwdFilterAlgo_t algorithm, size_t* bytes) {
  return workspace_size("cudnnGetConvolutionBackwardFilterWorkspaceSize", Pass::backward_filter,
                        handle, x, dw, how, dy, algorithm, bytes);
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha,
                                      const cudnnTensorDescriptor_t x_as, const void* x,
                                      const cudnnFilterDescriptor_t w_as, const void* w,
                                      const cudnnConvolutionDescriptor_t how,
                                      cudnnConvolutionFwdAlgo_t algorithm, void* workspace,
                                      size_t bytes, const void* beta,
                                      const cudnnTensorDescriptor_t y_as, void* y) {
  return convolve("cudnnConvolutionForward", Pass::forward, handle, x_as, w_as, how, y_as,
                  {writable(x), writable(w), y}, {alpha, beta, algorithm, workspace, bytes});
}

cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha,
                                           const cudnnFilterDescriptor_t w_as, const void* w,
                                           const cudnnTensorDescriptor_t dy_as, const void* dy,
                                           const cudnnConvolutionDescriptor_t how,
                                           cudnnConvolutionBwdDataAlgo_t algorithm, void* workspace,
                                           size_t bytes, const void* beta,
                                           const cudnnTensorDescriptor_t dx_as, void* dx) {
  return convolve("cudnnConvolutionBackwardData", Pass::backward_data, handle, dx_as, w_as, how,
                  dy_as, {dx, writable(w), writable(dy)},
                  {alpha, beta, algorithm, workspace, bytes});
}

cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha,
                                             const cudnnTensorDescriptor_t x_as, const void* x,
                                             const cudnnTensorDescriptor_t dy_as, const void* dy,
                                             const cudnnConvolutionDescriptor_t how,
                                             cudnnConvolutionBwdFilterAlgo_t algorithm,
                                             void* workspace, size_t bytes, const void* beta,
                                             const cudnnFilterDescriptor_t dw_as, void* dw) {
  return convolve("cudnnConvolutionBackwardFilter", Pass::backward_filter, handle, x_as, dw_as, how,
                  dy_as, {writable(x), dw, writable(dy)},
                  {alpha, beta, algorithm, workspace, bytes});
}

}  // extern "C"
