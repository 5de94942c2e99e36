#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cairn/core/error.h"
#include "store/store.h"
#include "store/store_socket.h"
#include "store/wire.h"

namespace cairn::parallel {
namespace {

using wire::Packer;
using wire::Reply;
using wire::Request;

constexpr auto kAnswerTime = Milliseconds(10'000);  // for what the server can answer at once
constexpr auto kMargin = Milliseconds(2000);        // beyond a timeout that the server keeps
constexpr auto kRepeatAfter = Milliseconds(1000);   // before a request is repeated

Packer start(std::uint64_t id, int rank, Request request) {
  return Packer()
      .number(id)
      .number(static_cast<std::uint64_t>(rank))
      .number(static_cast<std::uint64_t>(request));
}

std::uint64_t whole_ms(Milliseconds time) {
  return static_cast<std::uint64_t>(std::max<Milliseconds::rep>(0, time.count()));
}

}  // namespace

std::string this_process() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return core::str("pid ", getpid(), " on ", host.data());
}

StoreConnection::StoreConnection(const StoreAddress& address)
    : context_(std::make_unique<zmq::context_t>(1)),
      socket_(std::make_unique<zmq::socket_t>(*context_, zmq::socket_type::dealer)) {
  secure_client(*socket_, address.token);
  prepare(*socket_);
  socket_->set(zmq::sockopt::reconnect_ivl, 50);
  socket_->set(zmq::sockopt::reconnect_ivl_max, 500);
  socket_->connect(endpoint_of(address));
}

StoreConnection::~StoreConnection() = default;

void StoreConnection::send(std::string_view message) {
  zmq_send(socket_->handle(), message.data(), message.size(), ZMQ_DONTWAIT);
}

bool StoreConnection::receive(std::string& message, Milliseconds timeout, const Wakeup& wakeup) {
  zmq::message_t frame;
  if (!receive_frame(*socket_, frame)) {
    zmq::pollitem_t items[] = {{socket_->handle(), 0, ZMQ_POLLIN, 0},
                               {nullptr, wakeup.fd(), ZMQ_POLLIN, 0}};
    poll(items, 2, timeout);
    if (!receive_frame(*socket_, frame)) return false;
  }
  message = copy_message(frame);
  return true;
}

StoreClient::StoreClient(const StoreAddress& address, int rank)
    : address_(address), rank_(rank), connection_(address) {}

void StoreClient::throw_if_cancelled(std::string_view what) const {
  if (!cancelled_) return;
  const std::lock_guard lock(reason_mutex_);
  throw GroupBroken(what, cancelled_reason_);
}

void StoreClient::cancel(const std::string& reason) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (cancelled_) return;
    cancelled_reason_ = reason;
    cancelled_ = true;
  }
  cancelled_wakeup_.signal();
}

/// Needs mutex_. The answer's text; throws where the request is refused.
std::string StoreClient::request(std::string_view what, std::uint64_t id,
                                 const std::string& message, Milliseconds timeout) {
  const auto begin = Clock::now(), deadline = begin + timeout;
  auto next = begin;
  std::string received;
  for (auto now = begin; now < deadline || now == begin; now = Clock::now()) {
    throw_if_cancelled(what);
    if (now >= next) {
      connection_.send(message);
      next = now + kRepeatAfter;
    }
    const auto left = std::chrono::ceil<Milliseconds>(std::min(next, deadline) - now);
    if (!connection_.receive(received, left, cancelled_wakeup_)) continue;
    wire::Unpacker body(received);
    if (body.number() != id) continue;  // an answer that came late or twice
    const auto reply = static_cast<Reply>(body.number());
    std::string text = body.text();
    if (reply == Reply::ok) return text;
    core::fail<core::CommunicationError>(what, text);
  }
  throw_if_cancelled(what);
  core::fail<core::CommunicationError>(
      what, "the store at ", to_string(address_), " did not answer within ",
      static_cast<double>(timeout.count()) / 1000.0,
      " s (is rank 0 running there? has it the same CAIRN_JOB_TOKEN?)");
}

std::uint64_t StoreClient::join(int world_size, Milliseconds timeout,
                                const std::string& incarnation) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, rank_, Request::join)
                             .number(static_cast<std::uint64_t>(world_size))
                             .text(this_process())
                             .text(incarnation)
                             .number(whole_ms(timeout));
  return std::stoull(request("rendezvous", id, message.bytes(), timeout + kMargin));
}

void StoreClient::set(const std::string& key, std::string_view value) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  request("store", id, start(id, rank_, Request::set).text(key).text(value).bytes(), kAnswerTime);
}

std::string StoreClient::get(const std::string& key, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, rank_, Request::get).text(key).number(whole_ms(timeout));
  return request("store", id, message.bytes(), timeout + kMargin);
}

std::int64_t StoreClient::add(const std::string& key, std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message =
      start(id, rank_, Request::add).text(key).number(static_cast<std::uint64_t>(number));
  return std::stoll(request("store", id, message.bytes(), kAnswerTime));
}

}  // namespace cairn::parallel
