// The rendezvous store: a small server inside rank 0 at MASTER_ADDR:MASTER_PORT, and every rank's
// connection to it, over ZeroMQ.
//
// It lets the ranks find each other (join), hands around small values (set, get, add), keeps the
// ledger of collectives (see ledger.h) and notices dead ranks: each sends a heartbeat, and one that
// is silent for `heartbeat_timeout`, or silent for a second with its connection closed, breaks the
// group for all. Traffic is encrypted (CURVE) with keys derived from the job's token: who does not
// have the token gets no connection. A job without a token may meet on the loopback interface only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "store/ledger.h"

namespace zmq {
class context_t;
class socket_t;
}  // namespace zmq

namespace cairn::parallel {

using Milliseconds = std::chrono::milliseconds;

struct StoreAddress {
  std::string host;
  int port = 0;
  std::string token;  // empty: no encryption, loopback only
};
std::string to_string(const StoreAddress& address);  // "host:port"

/// A file descriptor that wakes a poll. Closed with the object.
class Wakeup {
 public:
  Wakeup();
  ~Wakeup();
  Wakeup(const Wakeup&) = delete;
  Wakeup& operator=(const Wakeup&) = delete;
  void signal() const;
  void clear() const;
  int fd() const { return fd_; }

 private:
  int fd_;
};

class StoreServer {
 public:
  /// Listens from here on. Throws CommunicationError: a port in use, an address that is not this
  /// machine's; InvalidArgument: no token beyond loopback.
  StoreServer(const StoreAddress& address, int world_size, Milliseconds heartbeat_timeout);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const { return port_; }  // also where port 0 asked for a free one
  /// Waits until every rank but rank 0 has left or the group is broken; at most `timeout`.
  void wait_for_others(Milliseconds timeout) const;

 private:
  class Loop;
  std::unique_ptr<zmq::context_t> context_;
  Wakeup stop_;
  int port_ = 0;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

/// An encrypted socket to the server.
class StoreConnection {
 public:
  explicit StoreConnection(const StoreAddress& address);
  ~StoreConnection();
  void send(std::string_view message);
  /// Waits for a message, the wakeup or the timeout; false without a message.
  bool receive(std::string& message, Milliseconds timeout, const Wakeup& wakeup);

 private:
  std::unique_ptr<zmq::context_t> context_;
  std::unique_ptr<zmq::socket_t> socket_;
};

/// One rank's requests. Safe to use from several threads; one request at a time. Every call throws
/// CommunicationError where the group is broken (with the reason), where the store does not answer
/// in time, or after cancel().
class StoreClient {
 public:
  StoreClient(const StoreAddress& address, int rank);

  /// Returns when all ranks have joined and their watchdogs are heard. Throws CommunicationError
  /// naming the missing ranks.
  void join(int world_size, Milliseconds timeout);
  void set(const std::string& key, std::string_view value);
  /// Waits for the key. Throws CommunicationError naming it.
  std::string get(const std::string& key, Milliseconds timeout);
  std::int64_t add(const std::string& key, std::int64_t number);
  /// Reports a collective without waiting.
  void report(const Ledger::Report& report);
  /// Reports it and waits for all: their values in rank order.
  std::vector<std::string> meet(const Ledger::Report& report);
  void leave(std::uint64_t collectives, Milliseconds timeout);

  /// From any thread: ends a request that waits, and every later one, with this reason.
  void cancel(const std::string& reason);
  /// For waits for something else than the store.
  void throw_if_cancelled(std::string_view what) const;

 private:
  struct Answer;
  Answer request(std::string_view what, std::uint64_t id, const std::string& message,
                 Milliseconds timeout);

  StoreAddress address_;
  int rank_;
  std::mutex mutex_;  // the connection and next_id_
  StoreConnection connection_;
  std::uint64_t next_id_ = 1;
  Wakeup cancelled_wakeup_;
  mutable std::mutex reason_mutex_;
  std::string cancelled_reason_;
  std::atomic<bool> cancelled_ = false;
};

/// Sends this rank's heartbeats from a thread of its own, asks whether this rank's devices are well,
/// learns from the server when the group is broken, and can break it.
class Watchdog {
 public:
  /// Both are called from the watchdog's thread: on_failure once, check at each heartbeat. What check
  /// returns breaks the group, unless the store soon knows of a cause (a dead rank).
  Watchdog(const StoreAddress& address, int rank, Milliseconds heartbeat_timeout,
           std::function<void(const std::string&)> on_failure,
           std::function<std::string()> check = {});
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Breaks the group for every rank, with this reason. Returns at once.
  void break_group(const std::string& reason);

 private:
  void run();
  void check_devices();
  void send_reason();

  StoreAddress address_;
  int rank_;
  Milliseconds heartbeat_timeout_;
  std::function<void(const std::string&)> on_failure_;
  std::function<std::string()> check_;
  Ledger::Clock::time_point trouble_since_ = Ledger::Clock::time_point::max();
  StoreConnection connection_;
  Wakeup wakeup_;
  std::atomic<bool> stop_ = false;
  std::mutex reason_mutex_;
  std::string reason_;  // to send; empty: none
  std::thread thread_;
};

/// How often ranks send heartbeats.
Milliseconds heartbeat_interval(Milliseconds heartbeat_timeout);

}  // namespace cairn::parallel
