// cuDNN's graph API, as far as it makes convolutions and attention: descriptors, heuristics, plans
// and their runs, computed in double when their work runs. What the library answers with a status
// is answered so (its handles and descriptors up to the heuristics were compared with cuDNN 9.19,
// which makes them without a GPU); what it leaves undefined is reported.
//
// Stricter than the library: heuristics propose first what is not deterministic, cannot be built,
// rounds to f16 or wants a terabyte of workspace; grouped f32 convolutions exist for row-major
// storage only; a tensor must have an id and a type, and no size may be zero.
#include <cudnn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "gpu/sim/capture.h"
#include "gpu/sim/cudnn_descriptor.h"
#include "gpu/sim/machine.h"
#include "gpu/sim/vendor_object.h"

struct cudnnContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::thread::id thread = std::this_thread::get_id();  // that made it or set its stream last
  std::atomic<int> users = 0;
  bool destroyed = false;  // its memory is never freed, so that late users find it
};

namespace cairn::gpusim {
namespace {

constexpr const char* kContract = "cudnn contract";
constexpr std::uint64_t kWorkspaceAlignment = 16;
constexpr std::size_t kMostScribbled = std::size_t{1} << 20;  // of a workspace

Objects<CudnnDescriptor>& descriptors() {
  static auto& all = *new Objects<CudnnDescriptor>{"descriptor"};
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

/// What is asked of descriptors ahead of the machine's lock.
struct Outside {
  std::mutex mutex;
  std::map<const void*, cudnnBackendDescriptorType_t> types;  // of live descriptors
  std::set<const void*> executing;                            // plans
};

Outside& outside() {
  static auto& all = *new Outside;
  return all;
}

const char* finalize_name_of(cudnnBackendDescriptor_t descriptor) {
  const std::lock_guard lock(outside().mutex);
  const auto found = outside().types.find(descriptor);
  return found == outside().types.end() ? "cudnnBackendFinalize" : finalize_name(found->second);
}

/// A plan that this thread executes; it serves one at a time.
class Executing {
 public:
  explicit Executing(cudnnBackendDescriptor_t plan) : plan_(plan) {
    const std::lock_guard lock(outside().mutex);
    if (outside().executing.insert(plan).second) return;
    report(kContract,
           "cudnnBackendExecute: expected a plan that serves one thread at a time, got one that "
           "another thread is executing");
  }
  ~Executing() {
    const std::lock_guard lock(outside().mutex);
    outside().executing.erase(plan_);
  }
  Executing(const Executing&) = delete;
  Executing& operator=(const Executing&) = delete;

 private:
  cudnnBackendDescriptor_t plan_;
};

using Pointers = std::map<std::int64_t, void*>;  // by the tensors' ids

Pointers pointers_of(const CudnnDescriptor& pack) {
  const auto ids = pack.values<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.values<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  Pointers found;
  for (std::size_t i = 0; i < ids.size(); ++i) found[ids[i]] = pointers[i];
  return found;
}

/// What a variant pack has to name.
std::vector<CudnnTensor> arguments_of(const CudnnDescriptor& plan) {
  if (plan.attention) return plan.attention->arguments();
  return {plan.problem.x, plan.problem.w, plan.problem.y};
}

/// A tensor that is passed by value lies in the host's memory, and is read now.
double number_at(const Call& call, const CudnnTensor& tensor, const void* data) {
  if (location_of(data) >= 0) {
    report(kContract, std::string(call.name()) +
                          ": expected a number that is passed by value in the host's memory, got "
                          "device memory");
  }
  if (tensor.type == CUDNN_DATA_INT32) return *static_cast<const std::int32_t*>(data);
  return double{*static_cast<const float*>(data)};
}

void check_alignment(const Call& call, const CudnnTensor& tensor, const void* data) {
  const auto promised = static_cast<std::uint64_t>(tensor.alignment);
  if (alignment_of(data, promised) >= promised) return;
  report(kContract, std::string(call.name()) + ": expected a tensor aligned to the " +
                        std::to_string(promised) + " bytes that its descriptor promises, got one " +
                        "aligned to " + std::to_string(alignment_of(data, promised)));
}

cudnnStatus_t execute(const Call& call, cudnnContext& handle, CudnnDescriptor& plan,
                      const CudnnDescriptor& pack) {
  if (plan.type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ||
      pack.type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
    return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
  if (!plan.finalized || !pack.finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  check_bound_context(kContract, call);
  Stream& queue = queue_of(call, handle);
  if (plan.handle->device != handle.device) {
    report(kContract, std::string(call.name()) + ": expected a plan made for device " +
                          std::to_string(handle.device) + ", got one made for " +
                          std::to_string(plan.handle->device));
  }
  const Pointers data = pointers_of(pack);
  std::map<std::int64_t, double> numbers;
  for (const CudnnTensor& tensor : arguments_of(plan)) {
    const auto found = data.find(tensor.id);
    if (found == data.end() || found->second == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (tensor.is_by_value) {
      numbers[tensor.id] = number_at(call, tensor, found->second);
    } else {
      check_alignment(call, tensor, found->second);
    }
  }
  const std::size_t needed = workspace_of(plan);
  void* const workspace = pack.value<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  if (needed > 0 && workspace == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  if (needed > 0) check_workspace(kContract, call, workspace, needed, kWorkspaceAlignment);
  enqueue_kernel(call, queue,
                 [data, numbers, workspace, needed, problem = plan.problem, config = plan.config,
                  attention = plan.attention, unloaded = plan.unloaded] {
                   if (*unloaded) {
                     report("use after destroy",
                            "expected a graph whose plans live as long, got one whose plan, and "
                            "its code with it, was destroyed");
                   }
                   const std::size_t used = std::min(needed, kMostScribbled);
                   if (used > 0) std::memset(write(workspace, used), 0xa7, used);
                   if (attention) return run_attention(*attention, config, data, numbers);
                   run_convolution(
                       problem, config,
                       {data.at(problem.x.id), data.at(problem.w.id), data.at(problem.y.id)});
                 });
  return CUDNN_STATUS_SUCCESS;
}

/// Of what is no call of its own.
void count(const char* what) {
  ++Machine::get().counters.calls[what];
}

/// Code is unloaded once what runs has ended; a graph may go on launching it.
void unload(CudnnDescriptor& plan) {
  if (plan.unloaded == nullptr || *plan.unloaded) return;
  Machine::get().finish_device(plan.handle->device);
  *plan.unloaded = true;
}

}  // namespace
}  // namespace cairn::gpusim

using namespace cairn::gpusim;  // NOLINT: the entry points stand outside it

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  const Call call("cudnnCreate");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (handle == nullptr) return CUDNN_STATUS_BAD_PARAM;
  if (refuse_unsafe_call() != 0) return CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
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

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* out) {
  const Call call("cudnnBackendCreateDescriptor");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (out == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  if (!is_known(type)) report("not simulated", "cuDNN's descriptor " + std::to_string(type));
  CudnnDescriptor* const made = descriptors().make();
  made->type = type;
  const std::lock_guard lock(outside().mutex);
  outside().types[made] = type;
  *out = made;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  const Call call("cudnnBackendDestroyDescriptor");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (descriptor == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  unload(descriptors().at(descriptor, call));
  descriptors().destroy(descriptor, call);
  const std::lock_guard lock(outside().mutex);
  outside().types.erase(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  const Call call("cudnnBackendSetAttribute");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (descriptor == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  CudnnDescriptor& target = descriptors().at(descriptor, call);
  for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && values && i < count; ++i)
    descriptors().at(static_cast<void* const*>(values)[i], call);
  if (type == CUDNN_TYPE_HANDLE && values != nullptr)
    check_alive(call, **static_cast<const cudnnHandle_t*>(values));
  return set_attribute(target, name, type, count, values);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (descriptor == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  const Call call(finalize_name_of(descriptor));
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  CudnnDescriptor& target = descriptors().at(descriptor, call);
  for (const CudnnDescriptor* other : target.refers_to) descriptors().at(other, call);
  if (target.handle != nullptr) queue_of(call, *target.handle);
  const cudnnStatus_t status = finalize(target, Machine::get().capability);
  const bool compiled = target.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && target.attention;
  if (status == CUDNN_STATUS_SUCCESS && compiled) count("cudnn compilation");
  return status;
}

cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t most,
                                       int64_t* count, void* values) {
  const Call call("cudnnBackendGetAttribute");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  if (descriptor == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && values && i < most; ++i)
    descriptors().at(static_cast<void**>(values)[i], call);
  return get_attribute(descriptors().at(descriptor, call), name, type, most, count, values);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
  if (handle == nullptr || plan == nullptr || pack == nullptr)
    return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  const InUse use(handle, "cudnnBackendExecute");
  const Executing executing(plan);
  const Call call("cudnnBackendExecute");
  if (call.injected() != 0) return static_cast<cudnnStatus_t>(call.injected());
  return execute(call, *handle, descriptors().at(plan, call), descriptors().at(pack, call));
}

}  // extern "C"
