#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cairn/core/error.h"
#include "store/descriptors.h"
#include "store/store.h"
#include "store/store_socket.h"
#include "store/wire.h"

namespace cairn::parallel {
namespace {

using wire::Packer;
using wire::Reply;
using wire::Request;

constexpr auto kMargin = Milliseconds(2000);        // beyond a timeout that the server keeps
constexpr auto kRepeatAfter = Milliseconds(1000);   // before a request is repeated
constexpr auto kAskAgainAfter = Milliseconds(100);  // where the store is still to come

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
      socket_(std::make_unique<zmq::socket_t>(open_socket(*context_, zmq::socket_type::dealer))) {
  const BlockedSignals blocked;
  secure_client(*socket_, address.token);
  prepare(*socket_);
  socket_->set(zmq::sockopt::reconnect_ivl, 50);
  socket_->set(zmq::sockopt::reconnect_ivl_max, 500);
  socket_->connect(endpoint_of(address));
}

StoreConnection::~StoreConnection() = default;

void StoreConnection::send(std::string_view message) {
  const BlockedSignals blocked;
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

/// A connection for one request.
class StoreClient::Turn {
 public:
  explicit Turn(StoreClient& client) : client_(client) {
    const std::lock_guard lock(client_.mutex_);
    if (client_.idle_.empty()) {
      connection_ = std::make_unique<StoreConnection>(client_.address_);
    } else {
      connection_ = std::move(client_.idle_.back());
      client_.idle_.pop_back();
    }
  }
  ~Turn() {
    const std::lock_guard lock(client_.mutex_);
    client_.idle_.push_back(std::move(connection_));
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  StoreConnection& connection() const { return *connection_; }

 private:
  StoreClient& client_;
  std::unique_ptr<StoreConnection> connection_;
};

StoreClient::StoreClient(const StoreAddress& address, int rank, JobStart start,
                         Milliseconds answer_time)
    : address_(address), rank_(rank), start_(std::move(start)), answer_time_(answer_time) {
  const Turn checks_the_address(*this);
}

StoreClient::~StoreClient() = default;

Packer StoreClient::start(std::uint64_t id, Request request) const {
  return Packer()
      .number(id)
      .number(static_cast<std::uint64_t>(rank_))
      .number(static_cast<std::uint64_t>(request))
      .number(start_.group);
}

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

/// The answer's text; throws where the request is refused.
std::string StoreClient::request(std::string_view what, std::uint64_t id,
                                 const std::string& message, Milliseconds timeout) {
  const Turn turn(*this);
  const auto begin = Clock::now(), deadline = begin + timeout;
  auto next = begin;
  std::string received, not_yet;
  for (auto now = begin; now < deadline || now == begin; now = Clock::now()) {
    throw_if_cancelled(what);
    if (now >= next) {
      turn.connection().send(message);
      next = now + kRepeatAfter;
    }
    const auto left = std::chrono::ceil<Milliseconds>(std::min(next, deadline) - now);
    if (!turn.connection().receive(received, left, cancelled_wakeup_)) continue;
    wire::Unpacker body(received);
    if (body.number() != id) continue;  // an answer that came late or twice
    const auto reply = static_cast<Reply>(body.number());
    std::string text = body.text();
    if (reply == Reply::ok) return text;
    if (reply == Reply::not_yet) {
      not_yet = std::move(text);
      next = Clock::now() + kAskAgainAfter;
      continue;
    }
    core::fail<core::CommunicationError>(what, text);
  }
  throw_if_cancelled(what);
  if (!not_yet.empty()) core::fail<core::CommunicationError>(what, not_yet);
  core::fail<core::CommunicationError>(
      what, "the store at ", to_string(address_), " did not answer within ",
      static_cast<double>(timeout.count()) / 1000.0,
      " s (is rank 0 running there? has it the same CAIRN_JOB_TOKEN?)", descriptor_hint());
}

std::uint64_t StoreClient::join(int world_size, Milliseconds timeout, std::string_view contact) {
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, Request::join)
                             .number(static_cast<std::uint64_t>(world_size))
                             .text(start_.run)
                             .text(this_process())
                             .text(contact)
                             .number(whole_ms(timeout));
  return std::stoull(request("rendezvous", id, message.bytes(), timeout + kMargin));
}

void StoreClient::set(const std::string& key, std::string_view value) {
  const std::uint64_t id = next_id_++;
  request("store", id, start(id, Request::set).text(key).text(value).bytes(), answer_time_);
}

std::string StoreClient::get(const std::string& key, Milliseconds timeout) {
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, Request::get).text(key).number(whole_ms(timeout));
  return request("store", id, message.bytes(), timeout + kMargin);
}

std::int64_t StoreClient::add(const std::string& key, std::int64_t number) {
  const std::lock_guard lock(adding_);
  const std::uint64_t id = next_id_++;
  const Packer message =
      start(id, Request::add).text(key).number(static_cast<std::uint64_t>(number));
  return std::stoll(request("store", id, message.bytes(), answer_time_));
}

}  // namespace cairn::parallel
