#include "ptx/runtime.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "cuda/queue.h"

namespace {

struct Dim3 {
  unsigned x, y, z;
};
struct State {
  std::map<const void*, std::string> names;          // of kernels, by nvcc's function for the host
  std::map<const void*, std::size_t> shared_limits;  // where one was set
  Dim3 grid{}, block{};
  std::size_t shared_bytes = 0;
  void* stream = nullptr;
  std::function<void(const cairn::ptx::Launch&)> launcher;
  int error = 0;
  std::exception_ptr thrown;  // by the launcher
};
State& state() {
  static State one;
  return one;
}

constexpr int kInvalidValue = 1,
              kAllSharedBytes = 8;  // cudaFuncAttributeMaxDynamicSharedMemorySize
constexpr std::size_t kDefaultSharedBytes = 48 << 10, kMostSharedBytes = 163 << 10;  // of sm_80

}  // namespace

namespace cairn::ptx {

void set_launcher(std::function<void(const Launch&)> launcher) {
  state().launcher = std::move(launcher);
}

}  // namespace cairn::ptx

// What code by nvcc calls, as its headers declare it.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
void __cudaUnregisterFatBinary(void** /*handle*/) {}
char __cudaInitModule(void** /*handle*/) {
  return 1;
}
void __cudaRegisterFunction(void** /*handle*/, const char* function, char* /*device*/,
                            const char* name, int /*threads*/, void*, void*, void*, void*, int*) {
  state().names[function] = name;
}
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  const auto bytes = static_cast<std::size_t>(value);
  if (attribute != kAllSharedBytes || bytes > kMostSharedBytes) return kInvalidValue;
  state().shared_limits[function] = bytes;
  return 0;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared_bytes,
                                     void* stream) {
  state().grid = grid;
  state().block = block;
  state().shared_bytes = shared_bytes;
  state().stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared_bytes, void* stream) {
  *grid = state().grid;
  *block = state().block;
  *shared_bytes = state().shared_bytes;
  *static_cast<void**>(stream) = state().stream;
  return 0;
}
int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** parameters,
                       std::size_t shared_bytes, void* stream) {
  const auto limit = state().shared_limits.find(kernel);
  const bool asked = limit != state().shared_limits.end();
  if (shared_bytes > (asked ? limit->second : kDefaultSharedBytes) || grid.y * grid.z != 1 ||
      block.y * block.z != 1) {
    return state().error = kInvalidValue;
  }
  try {
    state().launcher({state().names.at(kernel), grid.x, block.x, shared_bytes, stream, parameters});
  } catch (...) {  // not through code of another compiler
    state().thrown = std::current_exception();
  }
  return 0;
}
int cudaGetLastError() {
  return std::exchange(state().error, 0);
}
const char* cudaGetErrorString(int /*code*/) {
  return "invalid argument";
}
const char* cudaGetErrorName(int /*code*/) {
  return "cudaErrorInvalidValue";
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace cairn::kernels::cuda {

// A queue without a device: its stream is the queue itself.
Queue::Queue(const char* op, Device device)
    : op_(op), device_(device), guard_(device), stream_(this) {}
Queue::~Queue() = default;
void Queue::check_launch() const {
  if (state().thrown) std::rethrow_exception(std::exchange(state().thrown, nullptr));
  if (cudaGetLastError() != 0)
    throw core::DeviceError(std::string(op_) + ": the launch is refused");
}

}  // namespace cairn::kernels::cuda
