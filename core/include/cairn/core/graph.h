// Graph: work of a GPU that is recorded once and then queued as a whole, again and again, by one
// call.
//
//   const auto work = [&] { train_step(); };
//   core::Graph graph(device);
//   graph.warm_up(work);               // runs it: memory, tables and vendors' plans are there then
//   graph.capture(work);               // the host runs it once more, the device does not
//   for (int k = 0; k < 1000; ++k) graph.replay();
//
// What the host decides while it records is decided for good: addresses, shapes, numbers passed by
// value. So a capture refuses, with Unsupported, whatever needs the host each time: waits, values
// read or uploaded, work of another thread of the host, random draws that are passed by value
// (Generator::next), and memory that no warm-up has left. Other threads may go on meanwhile.
//
// Memory: a graph has a stream of its own, and blocks that are freed there stay for it alone,
// neither handed to others nor given back to the system, until it ends. Tensors that the recorded
// work made and that live on belong to it as well: each replay writes them anew.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cairn/core/stream.h"
#include "cairn/core/tensor_view.h"

namespace cairn::core {

class Graph {
 public:
  /// Throws Unsupported for a device without graphs: only CUDA has them.
  explicit Graph(Device device);
  /// Waits for the last replay, then gives the memory back.
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;

  /// Runs the work on this graph's stream, after what the current stream has so far and before what
  /// comes later. Work is ready to be captured when it would allocate nothing new: after a run in
  /// which nothing was made for good.
  void warm_up(const std::function<void()>& work);
  /// Records the work in place of what was recorded before. The calling thread's generator is as
  /// before; each replay draws what the work would. Where it throws, nothing is recorded.
  void capture(const std::function<void()>& work);
  bool captured() const;
  /// Queues what was recorded on the current stream. Replays never overlap.
  void replay();
  /// What is queued on the current stream from now on runs after the last replay, whatever stream
  /// that was on: before what a replay reads is written.
  void follow_last_replay() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Whether this thread is recording.
bool capturing();
/// Another number for each capture; 0 where this thread is not recording.
std::uint64_t capture_number();
/// What a replay of the graph that this thread is recording needs.
struct ReplayHook {
  /// f32 [1] for kernels of the graph's device: above 0 before they can meet what was half done,
  /// since it was given up by the host, which nobody asks in a replay.
  TensorView broken = {};
  /// By the host, in the thread that replays, whose current stream they are given. What throws
  /// before keeps the replay from running.
  std::function<void(const Stream&)> before = {}, after = {};
};
/// For as long as the graph has this recording; in the order of these calls.
void at_each_replay(ReplayHook hook);
/// ReplayHook::broken of all hooks so far, where this thread is recording.
std::vector<TensorView> broken_in_replays();
/// Throws Unsupported where it is: "[where] expected work that a graph can repeat, got `what`".
void refuse_in_capture(const char* where, const char* what);

}  // namespace cairn::core
