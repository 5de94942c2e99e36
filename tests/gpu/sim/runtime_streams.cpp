// The CUDA runtime: streams and events.
#include <set>

#include "gpu/sim/runtime.h"

using namespace cairn::gpusim;  // NOLINT: this file is that namespace's outside

namespace cairn::gpusim {
namespace {

std::set<Event*>& events() {
  static auto& all = *new std::set<Event*>;
  return all;
}
Event* find_event(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  return events().contains(event) ? event : nullptr;
}

/// A wait of the host, or a question, has no meaning in a graph.
int refuse_question(Stream& stream) {
  if (!stream.capture) return refuse_unsafe_call();
  stream.capture->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace
}  // namespace cairn::gpusim

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  const Call call("cudaStreamCreateWithFlags");
  if (const cudaError_t code = enter(call)) return code;
  if (flags != cudaStreamNonBlocking && flags != cudaStreamDefault) {
    return answer(cudaErrorInvalidValue);
  }
  touch_context(current_device());
  Stream& stream = *machine().make_stream(current_device());
  if (flags == cudaStreamDefault) machine().make_blocking(stream);
  *handle = static_cast<cudaStream_t>(machine().make_handle(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Call call("cudaStreamDestroy");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr || handle == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = stream->capture ? refuse_question(*stream) : 0) return answer(code);
  machine().destroy(handle);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Call call("cudaStreamSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_question(*stream)) return answer(code);
  count_wait(call.name());
  machine().finish(*stream);
  return answer(static_cast<cudaError_t>(machine().lost));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Call call("cudaStreamQuery");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_question(*stream)) return answer(code);
  machine().progress();
  return answer(machine().idle(*stream) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const Call call("cudaStreamWaitEvent");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  const Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_use(*stream)) return answer(code);
  if (stream->capture || event->capture) return answer(wait_in_capture(*stream, *event));
  machine().wait(*stream, *event);
  return cudaSuccess;
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Call call("cudaEventCreateWithFlags");
  if (const cudaError_t code = enter(call)) return code;
  touch_context(current_device());
  auto* const made = new Event{};
  made->device = current_device();
  made->timed = (flags & cudaEventDisableTiming) == 0;
  events().insert(made);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Call call("cudaEventDestroy");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  events().erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const Call call("cudaEventRecord");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  Stream* const stream = find_stream_of(stream_handle);
  if (event == nullptr || stream == nullptr || event->device != stream->device) {
    return answer(cudaErrorInvalidResourceHandle);
  }
  if (const int code = refuse_use(*stream)) return answer(code);
  machine().record(*event, *stream);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const Call call("cudaEventElapsedTime");
  if (const cudaError_t code = enter(call)) return code;
  touch_context(current_device());
  const Event *const start = find_event(from), *const end = find_event(to);
  const bool timed = start != nullptr && end != nullptr && start->timed && end->timed &&
                     start->recorded && end->recorded && start->device == end->device;
  if (!timed) return answer(cudaErrorInvalidResourceHandle);
  if (start->capture || end->capture) return answer(cudaErrorCapturedEvent);
  if (!machine().done(*start) || !machine().done(*end)) return answer(cudaErrorNotReady);
  *milliseconds = static_cast<float>(machine().milliseconds(*start, *end));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Call call("cudaEventQuery");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_question(*event)) return answer(code);
  machine().progress();
  return answer(machine().done(*event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Call call("cudaEventSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_question(*event)) return answer(code);
  count_wait(call.name());
  machine().finish(*event);
  return answer(static_cast<cudaError_t>(machine().lost));
}

}  // extern "C"
