#include "store/store_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sodium.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "cairn/core/error.h"
#include "store/descriptors.h"

namespace cairn::parallel {
namespace {

constexpr std::int64_t kMostMessageBytes = std::int64_t{64} << 20;  // of a message
constexpr std::size_t kStrongToken = 32;  // characters: 128 random bits in hex have as many

using Secret = std::array<unsigned char, 32>;

/// 32 bytes that only holders of the token know. What people make up is stretched first (Argon2id),
/// so that guessing is slow.
Secret secret_of(const std::string& token) {
  static std::mutex mutex;
  static std::map<std::string, Secret> known;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace(token);
  if (!is_new) return entry->second;
  CAIRN_CHECK(sodium_init() >= 0, "store", "expected libsodium to start, it did not");
  Secret& secret = entry->second;
  if (token.size() >= kStrongToken) {
    crypto_generichash(secret.data(), secret.size(),
                       reinterpret_cast<const unsigned char*>(token.data()), token.size(), nullptr,
                       0);
    return secret;
  }
  const unsigned char salt[crypto_pwhash_SALTBYTES + 1] = "cairn job token\1";
  CAIRN_CHECK(crypto_pwhash(secret.data(), secret.size(), token.data(), token.size(), salt,
                            crypto_pwhash_OPSLIMIT_INTERACTIVE, crypto_pwhash_MEMLIMIT_INTERACTIVE,
                            crypto_pwhash_ALG_ARGON2ID13) == 0,
              "store", "expected 64 MiB of memory to derive keys from CAIRN_JOB_TOKEN");
  return secret;
}

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
  const Secret master = secret_of(token);
  Secret secret;
  crypto_generichash(secret.data(), secret.size(), reinterpret_cast<const unsigned char*>(role),
                     std::strlen(role), master.data(), master.size());
  Keys keys;
  zmq_z85_encode(keys.secret.data(), secret.data(), secret.size());
  zmq_curve_public(keys.open.data(), keys.secret.data());
  return keys;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    core::fail<core::CommunicationError>("store", "cannot resolve MASTER_ADDR '", host,
                                         "': ", gai_strerror(error));
  }
  return {found, freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(in->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

/// Whether an interface of this host has the address.
bool is_here(const addrinfo& address) {
  if (is_loopback(address.ai_addr)) return true;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  const std::string wanted = numeric(address.ai_addr, address.ai_addrlen);
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != address.ai_family) continue;
    if (numeric(at->ifa_addr, address.ai_addrlen) == wanted) return true;
  }
  return false;
}

/// The socket, in the abstract namespace, that stands for a port where there is no token.
std::string local_endpoint(int port) {
  return core::str("ipc://@cairn-", geteuid(), "-", port);
}

void check_local(const StoreAddress& address) {
  CAIRN_CHECK(is_here(*resolve(address.host)), "store",
              "expected CAIRN_JOB_TOKEN to be set where MASTER_ADDR ('", address.host,
              "') is not this host (set it to the same secret text on every rank; cairn-run does)");
}

bool is_loopback_by_name(const std::string& host) {
  return host == "127.0.0.1" || host == "::1" || host == "localhost";
}

/// The port that zmq_bind() took, or its errno, negative.
int try_bind(zmq::socket_t& socket, const std::string& endpoint) {
  if (zmq_bind(socket.handle(), endpoint.c_str()) != 0) return -zmq_errno();
  const std::string bound = socket.get(zmq::sockopt::last_endpoint);
  return std::stoi(bound.substr(bound.find_last_of(":-") + 1));
}

int bind_local(zmq::socket_t& socket, int port) {
  const uid_t user = geteuid();
  zmq_setsockopt(socket.handle(), ZMQ_IPC_FILTER_UID, &user, sizeof user);
  if (port != 0) return try_bind(socket, local_endpoint(port));
  std::random_device random;
  int bound = -EADDRINUSE;
  for (int attempt = 0; attempt < 64 && bound == -EADDRINUSE; ++attempt) {
    bound = try_bind(socket, local_endpoint(static_cast<int>(20'000 + random() % 40'000)));
  }
  return bound;
}

}  // namespace

std::string to_string(const StoreAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

std::string endpoint_of(const StoreAddress& address) {
  if (address.token.empty()) {
    check_local(address);
    return local_endpoint(address.port);
  }
  const Addresses found = resolve(address.host);
  const std::string text = numeric(found->ai_addr, found->ai_addrlen);
  const std::string host = found->ai_family == AF_INET6 ? core::str("[", text, "]") : text;
  return core::str("tcp://", host, ":", address.port);
}

int listen(zmq::socket_t& socket, const StoreAddress& address) {
  const std::string port = address.port == 0 ? "*" : std::to_string(address.port);
  int bound = 0;
  if (address.token.empty()) {
    check_local(address);
    bound = bind_local(socket, address.port);
  } else {
    resolve(address.host);
    const bool loopback = is_loopback_by_name(address.host);
    const char* const host = !loopback ? "*" : address.host == "::1" ? "[::1]" : "127.0.0.1";
    bound = try_bind(socket, core::str("tcp://", host, ":", port));
  }
  if (bound >= 0) return bound;
  const char* const hint =
      bound == -EADDRINUSE
          ? "another job? set MASTER_PORT to a free port, or let cairn-run choose one"
          : "see MASTER_ADDR and MASTER_PORT";
  core::fail<core::CommunicationError>(
      "store", "cannot listen at ", to_string(address), ": ",
      bound == -EADDRINUSE ? core::str("port ", address.port, " is in use") : zmq_strerror(-bound),
      " (", hint, ")");
}

/// A connected UDP socket knows the address, without sending anything.
std::string address_towards(const std::string& host) {
  const Addresses found = resolve(host);
  auto* const target = found->ai_addr;
  const std::uint16_t port = htons(9);
  target->sa_family == AF_INET ? reinterpret_cast<sockaddr_in*>(target)->sin_port = port
                               : reinterpret_cast<sockaddr_in6*>(target)->sin6_port = port;
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage here{};
  auto* const address = reinterpret_cast<sockaddr*>(&here);
  socklen_t length = sizeof here;
  const bool known =
      connect(fd, target, found->ai_addrlen) == 0 && getsockname(fd, address, &length) == 0;
  close(fd);
  if (!known) {
    core::fail<core::CommunicationError>("store", "this machine has no route to MASTER_ADDR '",
                                         host, "'");
  }
  return is_loopback(address) ? "" : numeric(address, length);
}

void secure_server(zmq::socket_t& socket, const std::string& token) {
  socket.set(zmq::sockopt::ipv6, true);
  socket.set(zmq::sockopt::router_mandatory, true);
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

zmq::socket_t open_socket(zmq::context_t& context, zmq::socket_type type) {
  try {
    return {context, type};
  } catch (const zmq::error_t& error) {
    core::fail<core::CommunicationError>("store", "cannot open a socket: ", error.what(),
                                         descriptor_hint());
  }
}

void prepare(zmq::socket_t& socket) {
  socket.set(zmq::sockopt::linger, 500);
  socket.set(zmq::sockopt::sndhwm, 0);
  socket.set(zmq::sockopt::rcvhwm, 0);
  socket.set(zmq::sockopt::maxmsgsize, kMostMessageBytes);
}

bool receive_frame(zmq::socket_t& socket, zmq::message_t& message) {
  for (;;) {
    if (zmq_msg_recv(message.handle(), socket.handle(), ZMQ_DONTWAIT) >= 0) return true;
    if (zmq_errno() == EAGAIN) return false;
    if (zmq_errno() != EINTR) {
      core::fail<core::CommunicationError>("store", "cannot receive: ", zmq_strerror(zmq_errno()));
    }
  }
}

bool send_to(zmq::socket_t& socket, const std::string& identity, const std::string& message) {
  if (zmq_send(socket.handle(), identity.data(), identity.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
    return zmq_errno() == EAGAIN;
  }
  zmq_send(socket.handle(), message.data(), message.size(), ZMQ_DONTWAIT);
  return true;
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
    core::fail<core::CommunicationError>(
        "store", "cannot create an eventfd: ", std::strerror(errno), descriptor_hint());
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
