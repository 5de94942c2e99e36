#include "metrics_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::observe {

namespace {

constexpr const char* kServe = "observe";

struct Place {
  std::string host;
  int port = 0;
};

Place parsed_place(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  Place place{address.substr(0, std::min(colon, address.size()))};
  if (place.host.starts_with('[') && place.host.ends_with(']'))
    place.host = place.host.substr(1, place.host.size() - 2);
  const char* const begin = address.data() + std::min(colon + 1, address.size());
  const char* const end = address.data() + address.size();
  const auto [stopped, error] = std::from_chars(begin, end, place.port);
  CAIRN_CHECK(colon != std::string::npos && !place.host.empty() && error == std::errc{} &&
                  stopped == end && place.port >= 0 && place.port <= 65535,
              kServe, "expected an address to serve metrics at such as 127.0.0.1:9464, got '",
              address, "'");
  return place;
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* const v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                            : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
}

std::string response(const char* status, std::string_view body, const char* header = "") {
  return core::str("HTTP/1.1 ", status, "\r\nContent-Length: ", body.size(),
                   "\r\nConnection: close\r\n", header, "\r\n", body);
}

/// The time that this takes says nothing of where they differ.
bool same_secret(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < b.size(); ++i)
    difference |= static_cast<unsigned char>((i < a.size() ? a[i] : '\0') ^ b[i]);
  return difference == 0;
}

/// Of a request's lines after the first; "" where there is none.
std::string_view header_of(std::string_view request, std::string_view name) {
  for (std::size_t at = request.find("\r\n"); at != std::string_view::npos;
       at = request.find("\r\n", at + 2)) {
    std::string_view line = request.substr(at + 2);
    line = line.substr(0, line.find("\r\n"));
    const std::size_t colon = line.find(':');
    const bool same =
        colon == name.size() &&
        std::equal(name.begin(), name.end(), line.begin(), [](unsigned char a, unsigned char b) {
          return std::tolower(a) == std::tolower(b);
        });
    if (!same) continue;
    line.remove_prefix(colon + 1);
    while (line.starts_with(' ')) line.remove_prefix(1);
    while (line.ends_with(' ')) line.remove_suffix(1);
    return line;
  }
  return "";
}

}  // namespace

MetricsServer::MetricsServer(const std::string& address, int higher, std::string token,
                             std::function<std::string()> metrics)
    : token_(std::move(token)), metrics_(std::move(metrics)) {
  CAIRN_CHECK(token_.empty() || token_.size() >= kShortestToken, kServe,
              "expected a token (CAIRN_OBSERVE_TOKEN) of at least ", kShortestToken,
              " characters, got ", token_.size());
  listen_at(address, higher);
  ending_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { run(); });
}

MetricsServer::~MetricsServer() {
  eventfd_write(ending_, 1);
  thread_.join();
  for (const Connection& connection : connections_) close(connection.socket);
  close(listener_);
  close(ending_);
}

void MetricsServer::listen_at(const std::string& address, int higher) {
  const Place place = parsed_place(address);
  const int port = place.port == 0 ? 0 : place.port + higher;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int unknown = getaddrinfo(place.host.c_str(), std::to_string(port).c_str(), &hints, &found);
  CAIRN_CHECK(unknown == 0 && port <= 65535, kServe,
              "expected an address to serve metrics at, got '", address, "' (port ", port, ")",
              unknown == 0 ? "" : ": ", unknown == 0 ? "" : gai_strerror(unknown));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  CAIRN_CHECK(!token_.empty() || is_loopback(found->ai_addr), kServe,
              "expected a token where metrics are served beyond the loopback interface, at ",
              address, ", got none (set CAIRN_OBSERVE_TOKEN, or serve at 127.0.0.1)");
  listener_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listener_ < 0 || bind(listener_, found->ai_addr, found->ai_addrlen) != 0 ||
      listen(listener_, kMostConnections) != 0) {
    const std::string why = std::strerror(errno);
    if (listener_ >= 0) close(listener_);
    core::fail<core::IoError>(kServe, "expected to serve metrics at ", place.host, " port ", port,
                              ", got '", why, "'");
  }
  const bool v6 = found->ai_family == AF_INET6;
  address_ = core::str(v6 ? "[" : "", place.host, v6 ? "]" : "", ":", port_of(listener_));
}

void MetricsServer::run() {
  for (;;) {
    const bool room = connections_.size() < kMostConnections;
    std::vector<pollfd> waits{{ending_, POLLIN, 0},
                              {listener_, static_cast<short>(room ? POLLIN : 0), 0}};
    auto next = Clock::now() + std::chrono::hours(1);
    for (const Connection& connection : connections_) {
      const bool sends = !connection.answer.empty();
      waits.push_back({connection.socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0});
      next = std::min(next, connection.end);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    poll(waits.data(), waits.size(), static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (waits[0].revents != 0) return;
    auto wait = waits.begin() + 2;
    for (auto connection = connections_.begin(); connection != connections_.end(); ++wait) {
      const bool goes_on =
          Clock::now() < connection->end && (wait->revents == 0 || serve(*connection));
      if (!goes_on) close(connection->socket);
      connection = goes_on ? std::next(connection) : connections_.erase(connection);
    }
    if (waits[1].revents != 0) accept_one();
  }
}

void MetricsServer::accept_one() {
  const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) {  // it went, or there are too many open files: not in a circle without a pause
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return;
  }
  const auto end = Clock::now() + std::chrono::milliseconds(static_cast<int>(1000 * kMostSeconds));
  connections_.push_back({.socket = socket, .end = end});
}

bool MetricsServer::serve(Connection& connection) {
  if (connection.answer.empty()) return receive(connection);
  std::string& answer = connection.answer;
  const ssize_t sent = send(connection.socket, answer.data(), answer.size(), MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  answer.erase(0, static_cast<std::size_t>(sent));
  // Closed at once, with something unread, the answer might not arrive.
  if (answer.empty()) shutdown(connection.socket, SHUT_WR);
  return true;
}

/// What comes after the answer is not looked at.
bool MetricsServer::receive(Connection& connection) {
  std::array<char, kMostRequest> buffer;
  const ssize_t got = recv(connection.socket, buffer.data(), buffer.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  if (connection.answered) return true;
  connection.request.append(buffer.data(), static_cast<std::size_t>(got));
  const bool whole = connection.request.find("\r\n\r\n") != std::string::npos;
  const bool too_long = connection.request.size() > kMostRequest;
  if (!whole && !too_long) return true;
  connection.answered = true;
  connection.answer = too_long ? response("431 Request Header Fields Too Large", "")
                               : answer_to(connection.request);
  return true;
}

bool MetricsServer::has_token(std::string_view request) const {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string_view given = header_of(request, "Authorization");
  return given.starts_with(kBearer) && same_secret(given.substr(kBearer.size()), token_);
}

std::string MetricsServer::answer_to(std::string_view request) const {
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const std::size_t first = line.find(' '), second = line.rfind(' ');
  if (first == second || !line.substr(second + 1).starts_with("HTTP/1."))
    return response("400 Bad Request", "");
  if (!token_.empty() && !has_token(request))
    return response("401 Unauthorized", "", "WWW-Authenticate: Bearer\r\n");
  if (line.substr(0, first) != "GET")
    return response("405 Method Not Allowed", "", "Allow: GET\r\n");
  std::string_view path = line.substr(first + 1, second - first - 1);
  path = path.substr(0, path.find('?'));
  if (path != "/metrics") return response("404 Not Found", "metrics are at /metrics\n");
  const std::string metrics = metrics_();
  if (metrics.empty()) return response("503 Service Unavailable", "");
  return response("200 OK", metrics,
                  "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n");
}

}  // namespace cairn::observe
