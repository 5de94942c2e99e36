// Addresses and keys of the store's sockets. Private to the store.
#pragma once

#include <string>
#include <zmq.hpp>

#include "store/store.h"

namespace cairn::parallel {

/// "tcp://127.0.0.1:29500". Throws CommunicationError for a host that cannot be resolved,
/// InvalidArgument for a host beyond loopback without a token.
std::string endpoint_of(const StoreAddress& address);

void secure_server(zmq::socket_t& socket, const std::string& token);
void secure_client(zmq::socket_t& socket, const std::string& token);

/// A message's bytes. ZeroMQ's threads wrote them, which ThreadSanitizer cannot see:
/// tests/tsan.supp knows this function.
std::string copy_message(const zmq::message_t& message);

/// zmq::poll that takes an interruption by a signal for a wake-up without news.
void poll(zmq::pollitem_t* items, std::size_t count, Milliseconds timeout);

}  // namespace cairn::parallel
