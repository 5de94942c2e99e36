#include "gpu/sim/capture.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

std::vector<std::shared_ptr<Capture>>& under_way() {
  return Machine::get().captures;
}

bool has_stream_of(const Capture& capture, int device) {
  const std::vector<int>& devices = capture.graph.devices;
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

/// A captured stream that waits for the default stream makes that one part of the graph, which it
/// cannot be.
bool breaks_by_the_default_stream(const Stream& stream) {
  Machine& machine = Machine::get();
  if (&stream != machine.default_stream(stream.device)) return false;
  bool broke = false;
  for (const Stream* other : machine.blocking_streams()) {
    if (other->device != stream.device || !other->capture) continue;
    other->capture->broken = broke = true;
  }
  return broke;
}

}  // namespace

std::size_t Capture::add_branch(int device) {
  graph.devices.push_back(device);
  last.push_back(0);
  return last.size() - 1;
}

void Capture::add(std::size_t branch, Work work, std::size_t other_node) {
  graph.nodes.push_back({std::move(work), branch, {last[branch]}});
  if (other_node != 0) graph.nodes.back().after.push_back(other_node);
  last[branch] = graph.nodes.size();
}

bool Capture::is_joined() const {
  std::vector<bool> before(graph.nodes.size() + 1, false);
  std::vector<std::size_t> open{last[0]};
  while (!open.empty()) {
    const std::size_t number = open.back();
    open.pop_back();
    if (number == 0 || before[number]) continue;
    before[number] = true;
    const std::vector<std::size_t>& after = graph.node(number).after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return std::all_of(last.begin(), last.end(),
                     [&](std::size_t number) { return number == 0 || before[number]; });
}

void begin_capture(Stream& stream, int mode) {
  const auto capture = std::make_shared<Capture>();
  capture->origin = &stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream.capture = capture;
  stream.branch = capture->add_branch(stream.device);
  under_way().push_back(capture);
}

void end_capture(Capture& capture) {
  capture.ended = true;
  for (const auto& stream : Machine::get().streams()) {
    if (stream->capture.get() == &capture) stream->capture = nullptr;
  }
  std::erase_if(under_way(), [&](const auto& other) { return other.get() == &capture; });
}

// Each branch in a stream; a branch starts after the launch.
void queue_graph(Executable& executable, Stream& stream) {
  Machine& machine = Machine::get();
  const Graph& graph = executable.graph;
  const auto stream_of = [&](std::size_t branch) -> Stream& {
    return branch == 0 ? stream : *executable.branches[branch - 1];
  };
  std::vector<Event> points(graph.nodes.size() + 1);
  machine.record(points[0], stream);
  for (std::size_t number = 1; number <= graph.nodes.size(); ++number) {
    const Node& node = graph.node(number);
    for (const std::size_t other : node.after) {
      const std::size_t branch = other == 0 ? 0 : graph.node(other).branch;
      if (branch != node.branch) machine.wait(stream_of(node.branch), points[other]);
    }
    Work work = node.work.again ? node.work.again() : node.work;
    work.name = node.work.name;
    if (work.run) machine.queue(stream_of(node.branch), std::move(work));
    machine.record(points[number], stream_of(node.branch));
  }
}

int refuse_use(Stream& stream) {
  if (breaks_by_the_default_stream(stream)) return cudaErrorStreamCaptureImplicit;
  return stream.capture && stream.capture->broken ? cudaErrorStreamCaptureInvalidated : 0;
}

int refuse_unsafe_call() {
  bool refused = false;
  for (const auto& capture : under_way()) {
    const bool own = capture->thread == std::this_thread::get_id() &&
                     capture->mode != cudaStreamCaptureModeRelaxed;
    if (!own && capture->mode != cudaStreamCaptureModeGlobal) continue;
    capture->broken = refused = true;
  }
  return refused ? cudaErrorStreamCaptureUnsupported : 0;
}

int refuse_wait_for_device(int device) {
  int refused = refuse_unsafe_call();
  for (const auto& capture : under_way()) {
    if (!has_stream_of(*capture, device)) continue;
    capture->broken = true;
    refused = cudaErrorStreamCaptureUnsupported;
  }
  return refused;
}

int refuse_question(const Event& event) {
  if (!event.capture) return refuse_unsafe_call();
  event.capture->broken = true;
  return cudaErrorCapturedEvent;
}

int wait_in_capture(Stream& stream, const Event& event) {
  const std::shared_ptr<Capture> own = stream.capture, theirs = event.capture;
  const auto refuse = [&](int code) {
    if (own) own->broken = true;
    if (theirs) theirs->broken = true;
    return code;
  };
  if (!theirs) return refuse(cudaErrorStreamCaptureIsolation);
  if (theirs->ended) return refuse(cudaErrorCapturedEvent);
  if (own && own != theirs) return refuse(cudaErrorStreamCaptureMerge);
  if (theirs->broken) return cudaErrorStreamCaptureInvalidated;
  if (&stream == Machine::get().default_stream(stream.device)) {
    return refuse(cudaErrorStreamCaptureImplicit);
  }
  if (!own) {
    stream.capture = theirs;
    stream.branch = theirs->add_branch(stream.device);
  }
  theirs->add(stream.branch, {"wait", {}}, event.node);
  return 0;
}

}  // namespace cairn::gpusim
