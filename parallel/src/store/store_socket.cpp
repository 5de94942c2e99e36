#include "store/store_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>

#include "cairn/core/error.h"
#include "store/sha256.h"

namespace cairn::parallel {
namespace {

struct Keys {
  std::array<char, 41> secret{};
  std::array<char, 41> open{};
};

/// Both sides derive both key pairs from the token. The server's public key never crosses the wire
/// and nobody can open a CURVE handshake without it, so only holders of the token get in.
Keys derive_keys(const std::string& token, const char* role) {
  if (zmq_has("curve") == 0) {
    core::fail<core::Unsupported>(
        "store",
        "this ZeroMQ was built without CURVE, which keeps strangers out of the job "
        "(install libzmq with libsodium, or unset CAIRN_JOB_TOKEN for a job on one machine)");
  }
  const auto secret = sha256(core::str("cairn rendezvous store, ", role, "\n", token));
  Keys keys;
  zmq_z85_encode(keys.secret.data(), secret.data(), secret.size());
  zmq_curve_public(keys.open.data(), keys.secret.data());
  return keys;
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(in->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

}  // namespace

std::string to_string(const StoreAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

std::string endpoint_of(const StoreAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.host.c_str(), nullptr, &hints, &found); error != 0) {
    core::fail<core::CommunicationError>("store", "cannot resolve MASTER_ADDR '", address.host,
                                         "': ", gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  CAIRN_CHECK(!address.token.empty() || is_loopback(found->ai_addr), "store",
              "expected CAIRN_JOB_TOKEN to be set where MASTER_ADDR ('", address.host,
              "') is not the loopback interface (set it to the same secret text on every rank; "
              "cairn-run does)");
  std::array<char, NI_MAXHOST> numeric{};
  getnameinfo(found->ai_addr, found->ai_addrlen, numeric.data(), numeric.size(), nullptr, 0,
              NI_NUMERICHOST);
  const std::string host = found->ai_family == AF_INET6 ? core::str("[", numeric.data(), "]")
                                                        : std::string(numeric.data());
  return core::str("tcp://", host, ":", address.port == 0 ? "*" : std::to_string(address.port));
}

void secure_server(zmq::socket_t& socket, const std::string& token) {
  socket.set(zmq::sockopt::ipv6, true);
  if (token.empty()) return;
  const Keys keys = derive_keys(token, "server");
  socket.set(zmq::sockopt::curve_server, true);
  socket.set(zmq::sockopt::curve_secretkey, keys.secret.data());
}

void secure_client(zmq::socket_t& socket, const std::string& token) {
  socket.set(zmq::sockopt::ipv6, true);
  if (token.empty()) return;
  const Keys server = derive_keys(token, "server"), client = derive_keys(token, "client");
  socket.set(zmq::sockopt::curve_serverkey, server.open.data());
  socket.set(zmq::sockopt::curve_publickey, client.open.data());
  socket.set(zmq::sockopt::curve_secretkey, client.secret.data());
}

std::string copy_message(const zmq::message_t& message) {
  return message.to_string();
}

void poll(zmq::pollitem_t* items, std::size_t count, Milliseconds timeout) {
  const int result = zmq_poll(items, static_cast<int>(count), static_cast<long>(timeout.count()));
  if (result >= 0) return;
  for (std::size_t i = 0; i < count; ++i) items[i].revents = 0;
  if (zmq_errno() != EINTR)
    core::fail<core::CommunicationError>("store", "poll failed: ", zmq_strerror(zmq_errno()));
}

Wakeup::Wakeup() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0)
    core::fail<core::CommunicationError>("store",
                                         "cannot create an eventfd (too many open files?)");
}
Wakeup::~Wakeup() {
  close(fd_);
}
void Wakeup::signal() const {
  eventfd_write(fd_, 1);
}
void Wakeup::clear() const {
  eventfd_t ignored = 0;
  eventfd_read(fd_, &ignored);
}

}  // namespace cairn::parallel
