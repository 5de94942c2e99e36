// OpenMetrics over HTTP, for Prometheus: GET /metrics, and nothing else.
//
// What comes in is bounded, because anybody who reaches the address may send it: a request of at
// most kMostRequest bytes, kMostConnections at a time, each for kMostSeconds in all, however slowly
// it sends or reads (libraries' servers, such as cpp-httplib, bound each read instead). One
// thread; a connection is answered once.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <thread>

namespace cairn::observe {

class MetricsServer {
 public:
  static constexpr std::size_t kMostRequest = 4096, kMostConnections = 16, kShortestToken = 16;
  static constexpr double kMostSeconds = 2;

  /// Listens at "127.0.0.1:9464", "[::1]:9464" and the like; `higher` is added to a port that is
  /// not 0. `token` must come with each request unless it is empty, which the loopback interface
  /// alone may be. `metrics` is called in the server's thread; "": there are none now. Throws
  /// InvalidArgument, and IoError where it cannot listen.
  MetricsServer(const std::string& address, int higher, std::string token,
                std::function<std::string()> metrics);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  /// With the port that it has.
  const std::string& address() const { return address_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int socket = -1;
    Clock::time_point end;
    std::string request, answer;
    bool answered = false;
  };

  void listen_at(const std::string& address, int higher);
  void run();
  void accept_one();
  bool serve(Connection& connection);  // false: it is over
  bool receive(Connection& connection);
  std::string answer_to(std::string_view request) const;
  bool has_token(std::string_view request) const;

  std::string token_, address_;
  std::function<std::string()> metrics_;
  int listener_ = -1, ending_ = -1;
  std::list<Connection> connections_;
  std::thread thread_;
};

}  // namespace cairn::observe
