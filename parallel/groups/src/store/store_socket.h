// Addresses, keys and calls of the sockets of the control plane. Private to it.
#pragma once

#include <signal.h>

#include <string>
#include <zmq.hpp>

#include "store/store.h"

namespace cairn::parallel {

/// Where to connect to: "tcp://10.0.0.1:29500", or without a token the local socket of that port.
/// Throws CommunicationError for a host that cannot be resolved, InvalidArgument for one that is
/// not this host without a token.
std::string endpoint_of(const StoreAddress& address);
/// Binds the socket and returns the port, a free one where it is 0. With a token it listens on all
/// interfaces, because what MASTER_ADDR means here (127.0.1.1 on Debian, a service's or a gateway's
/// address) is not what it means to others; on loopback only where MASTER_ADDR says so. Throws as
/// endpoint_of, and CommunicationError for a port in use.
int listen(zmq::socket_t& socket, const StoreAddress& address);
/// This host's address on the way to `host`, as others may use it; empty where that is loopback:
/// then this is the machine that others know as `host`.
std::string address_towards(const std::string& host);

/// Throws CommunicationError, which says where there are too many open files.
zmq::socket_t open_socket(zmq::context_t& context, zmq::socket_type type);
void secure_server(zmq::socket_t& socket, const std::string& token);
void secure_client(zmq::socket_t& socket, const std::string& token);
/// What all sockets have in common: bounded messages, no lost last words.
void prepare(zmq::socket_t& socket);

/// Takes a message, if there is one.
bool receive_frame(zmq::socket_t& socket, zmq::message_t& message);
/// Through a router. False where nobody is connected under that identity any more.
bool send_to(zmq::socket_t& socket, const std::string& identity, const std::string& message);

/// A message's bytes. ZeroMQ's threads wrote them, which ThreadSanitizer cannot see:
/// tests/tsan.supp knows this function.
std::string copy_message(const zmq::message_t& message);

/// zmq::poll that takes an interruption by a signal for a wake-up without news.
void poll(zmq::pollitem_t* items, std::size_t count, Milliseconds timeout);

/// For threads that are started meanwhile: signals are for the program's own. And for calls of
/// ZeroMQ's that would end where one comes: to bind and to connect.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace cairn::parallel
