// A rank's control thread: carries what ControlNode says between this rank, its parent and its
// children, over ZeroMQ, and learns from it when the job is broken.
//
// Nothing is sent for a collective: ranks note theirs in a History, and others ask for it only when
// one does not end. The connections are the store's: encrypted with keys of the job's token.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/node.h"
#include "store/store.h"

namespace cairn::parallel {

class Control {
 public:
  struct Options {
    int rank = 0;
    int world_size = 1;
    std::string master_addr, token;
    Milliseconds heartbeat_timeout{0};
    /// From the control's thread: once, where the job is broken.
    std::function<void(const std::string& reason)> on_failure;
    /// From the control's thread, now and then: what is wrong with this rank's devices; what it
    /// returns breaks the job, unless somebody's death soon explains it. Empty: nothing.
    std::function<std::string()> check_devices;
  };

  /// Listens for children, if the rank has any.
  explicit Control(Options options);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int port() const { return port_; }  // where it listens; 0: nowhere
  /// Starts to watch and to be watched, in the job of this number; returns when the parent has
  /// answered. `parent` is where it listens (none for rank 0).
  void start(std::uint64_t job, const StoreAddress& parent);

  /// Answers for the group's collectives until the history is gone or has left.
  void add(const std::shared_ptr<History>& history);
  /// Breaks the job for every rank, with this reason. Returns at once.
  void break_job(const std::string& reason);
  /// This rank takes part in no group any more. Returns when no other rank needs it: those below it
  /// in the tree may go on for long, in groups without it.
  void leave();

  /// Sent so far.
  std::uint64_t messages() const { return messages_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  class Sockets;
  void run();
  void take_orders();
  void receive(Clock::time_point now);
  void send(Clock::time_point now);
  void watch_devices(Clock::time_point now);
  void collect_left();
  std::vector<std::shared_ptr<History>> histories();

  Options options_;
  int port_ = 0;
  std::uint64_t job_ = 0;
  Wakeup wakeup_;
  std::unique_ptr<Sockets> sockets_;
  std::unique_ptr<ControlNode> node_;  // of the thread, once it runs
  Clock::time_point trouble_since_ = Clock::time_point::max();
  std::atomic<std::uint64_t> messages_ = 0, bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<History>> histories_;
  std::string reason_;  // to break the job with
  bool leaving_ = false, stop_ = false, gone_ = false, heard_ = false;
  std::thread thread_;
};

}  // namespace cairn::parallel
