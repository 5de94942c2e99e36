// Captures of streams, and the graphs that they make: works, and what comes before what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "gpu/sim/machine.h"

namespace cairn::gpusim {

struct Event;

/// A captured work, or where one branch waits for another. Nodes are numbered from 1; 0 is the
/// launch of the graph.
struct Node {
  Work work;  // without run: a wait
  std::size_t branch = 0;
  std::vector<std::size_t> after;  // nodes
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<int> devices;  // of the branches: the captured streams, the origin first

  const Node& node(std::size_t number) const { return nodes[number - 1]; }
};

/// What can be launched.
struct Executable {
  Graph graph;
  std::vector<Stream*> branches;  // streams of its own, but for the first
};

struct Capture {
  Stream* origin = nullptr;
  int mode = 0;            // a cudaStreamCaptureMode
  std::thread::id thread;  // that began it
  bool broken = false, ended = false;
  Graph graph;
  std::vector<std::size_t> last;  // node of each branch

  std::size_t add_branch(int device);
  void add(std::size_t branch, Work work, std::size_t other_node = 0);
  /// Whether the origin comes after all that the other branches do.
  bool is_joined() const;
};

void begin_capture(Stream& stream, int mode);
/// Takes its streams out of it.
void end_capture(Capture& capture);
void queue_graph(Executable& executable, Stream& stream);

// What a capture forbids. Each answers an error of the runtime, or 0, and breaks the captures that
// it concerns.

/// The stream is to be used.
int refuse_use(Stream& stream);
/// The host asks for what may wait for a device, in the calling thread.
int refuse_unsafe_call();
/// The host waits for all streams of a device.
int refuse_wait_for_device(int device);
/// The host waits for the event, or asks whether it is done.
int refuse_question(const Event& event);
/// Where one of the two is captured: makes the stream wait for the event in the graph.
int wait_in_capture(Stream& stream, const Event& event);

}  // namespace cairn::gpusim
