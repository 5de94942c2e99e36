// One worker thread that runs work in order: what a CPU stream other than the default one is made
// of.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace cairn::core {

class WorkQueue {
 public:
  using Task = std::function<void()>;

  /// `on_start` runs first in the worker thread.
  WorkQueue(std::string name, Task on_start);
  /// Runs what is queued, then ends the thread. Callable from the worker itself (the last handle
  /// may die in its work).
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// In order, in the worker; inline if called from the worker. Dropped while an error waits to be
  /// reported.
  void submit(Task work);
  /// Like submit, but runs also while an error waits; it gets that error (or null).
  void submit_always(std::function<void(const std::exception_ptr&)> work);
  bool idle() const;                // nothing left but (in the worker) the running work
  void drain();                     // waits until all work submitted so far is done
  std::exception_ptr take_error();  // the first error since the last call, or null
  void set_error(std::exception_ptr error);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state, const Task& on_start);
  // The thread shares it: the thread may outlive this object by a moment.
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace cairn::core
