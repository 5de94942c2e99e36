// The CUDA runtime: captures and graphs.
#include <vector>

#include "gpu/sim/runtime.h"

using namespace cairn::gpusim;  // NOLINT: this file is that namespace's outside

namespace cairn::gpusim {
namespace {

/// Why a capture cannot end here; 0: it can.
int refuse_end(const Stream& stream) {
  if (!stream.capture) return cudaErrorIllegalState;
  const Capture& capture = *stream.capture;
  if (capture.origin != &stream) return cudaErrorStreamCaptureUnmatched;
  const bool own = capture.thread == std::this_thread::get_id();
  return own || capture.mode == cudaStreamCaptureModeRelaxed ? 0
                                                             : cudaErrorStreamCaptureWrongThread;
}

}  // namespace
}  // namespace cairn::gpusim

extern "C" {

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Call call("cudaStreamIsCapturing");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  *status = !stream->capture          ? cudaStreamCaptureStatusNone
            : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Call call("cudaStreamBeginCapture");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (stream == machine().default_stream(stream->device)) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if (stream->capture) return answer(cudaErrorIllegalState);
  begin_capture(*stream, mode);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Call call("cudaStreamEndCapture");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  *graph = nullptr;
  if (const int code = refuse_end(*stream)) return answer(code);
  const std::shared_ptr<Capture> capture = stream->capture;
  end_capture(*capture);
  if (capture->broken) return answer(cudaErrorStreamCaptureInvalidated);
  if (!capture->is_joined()) return answer(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(std::move(capture->graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  const Call call("cudaGraphInstantiate");
  if (const cudaError_t code = enter(call)) return code;
  auto* const made = new Executable{*reinterpret_cast<Graph*>(graph), {}};
  for (std::size_t branch = 1; branch < made->graph.devices.size(); ++branch) {
    made->branches.push_back(machine().make_stream(made->graph.devices[branch]));
  }
  *executable = reinterpret_cast<cudaGraphExec_t>(made);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const Call call("cudaGraphLaunch");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (stream->capture) {  // graphs in graphs are not simulated
    stream->capture->broken = true;
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if (const int code = refuse_use(*stream)) return answer(code);
  queue_graph(*reinterpret_cast<Executable*>(executable), *stream);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Call call("cudaGraphExecDestroy");
  delete reinterpret_cast<Executable*>(executable);
  return enter(call);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Call call("cudaGraphDestroy");
  delete reinterpret_cast<Graph*>(graph);
  return enter(call);
}

}  // extern "C"
