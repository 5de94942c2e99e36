// The rendezvous store: a small server inside rank 0 at MASTER_ADDR:MASTER_PORT, and every rank's
// connection to it, over ZeroMQ. The ranks find each other through it (join) and hand around small
// values while they connect (set, get, add); afterwards nothing passes through it.
//
// With a token, traffic is encrypted (CURVE) with keys derived from it: who does not have the token
// gets no connection. Without one the store is a local socket, not a port: only processes of this
// user on this host may join.
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

#include "clock.h"
#include "store/broken.h"
#include "store/wire.h"

namespace zmq {
class context_t;
class socket_t;
}  // namespace zmq

namespace cairn::parallel {

struct StoreAddress {
  std::string host;
  int port = 0;
  std::string token;  // empty: this user's processes on this host
};
std::string to_string(const StoreAddress& address);  // "host:port"

/// Of which group a process is: one that follows another at the same address is not taken for it.
struct JobStart {
  std::uint64_t group = 1;  // among those that each process makes, one after the other
  std::string run;  // CAIRN_RUN_ID: which start of a launcher the process is of; empty: none
};

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

/// What ranks leave for each other while they connect.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// Waits for the key. Throws CommunicationError naming it, and where the job breaks meanwhile.
  virtual std::string get(const std::string& key, Milliseconds timeout) = 0;
  /// For waits for something else than the store: throws where the job is broken.
  virtual void throw_if_cancelled(std::string_view what) const = 0;
};

class StoreServer {
 public:
  /// Listens from here on. Ranks of groups that have ended are refused, those of later groups are
  /// told to wait. A rank that its launcher has started again takes the place of the one before,
  /// or waits where the group has already begun: that one breaks, and another follows here. Throws
  /// CommunicationError: a port in use; InvalidArgument: no token, and an address that is not this
  /// host's.
  StoreServer(const StoreAddress& address, int world_size, std::uint64_t group = 1);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const { return port_; }  // also where port 0 asked for a free one

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

/// One rank's requests. Several threads may each have one under way: groups of a split connect at
/// the same time. A request is repeated until it is answered, so that a connection may break in
/// between. Every call throws CommunicationError where the store does not answer in time, or after
/// cancel().
class StoreClient : public Store {
 public:
  /// What the server can answer at once is waited for this long.
  static constexpr auto kAnswerTime = Milliseconds(10'000);
  StoreClient(const StoreAddress& address, int rank, JobStart start = {},
              Milliseconds answer_time = kAnswerTime);
  ~StoreClient() override;

  /// Returns the job's number when all ranks have joined; the store may still have to come. Who
  /// joins leaves its contact for the others, under contact_key(). Throws CommunicationError naming
  /// the missing ranks.
  std::uint64_t join(int world_size, Milliseconds timeout, std::string_view contact = {});
  static std::string contact_key(int rank) { return "contact/" + std::to_string(rank); }
  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, Milliseconds timeout) override;
  std::int64_t add(const std::string& key, std::int64_t number);

  /// From any thread: ends a request that waits, and every later one, with this reason.
  void cancel(const std::string& reason);
  void throw_if_cancelled(std::string_view what) const override;

 private:
  class Turn;
  wire::Packer start(std::uint64_t id, wire::Request request) const;
  std::string request(std::string_view what, std::uint64_t id, const std::string& message,
                      Milliseconds timeout);

  StoreAddress address_;
  int rank_;
  JobStart start_;
  Milliseconds answer_time_;
  std::atomic<std::uint64_t> next_id_ = 1;
  std::mutex adding_;  // the server knows each rank's last sum alone
  std::mutex mutex_;   // idle_
  std::vector<std::unique_ptr<StoreConnection>>
      idle_;  // as many as requests were under way at once
  Wakeup cancelled_wakeup_;
  mutable std::mutex reason_mutex_;
  std::string cancelled_reason_;
  std::atomic<bool> cancelled_ = false;
};

/// "pid 77 on host".
std::string this_process();

}  // namespace cairn::parallel
