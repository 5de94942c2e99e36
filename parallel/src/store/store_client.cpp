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

using Clock = Ledger::Clock;
using wire::Packer;
using wire::Reply;
using wire::Request;

constexpr auto kAnswerTime = Milliseconds(10'000);  // for what the server can answer at once
constexpr auto kMargin = Milliseconds(2000);        // beyond a timeout that the server keeps
// How long the store has to say who died before a device's trouble, which follows from it, is the
// reason.
constexpr auto kPrecedence = Milliseconds(2000);

Packer start(std::uint64_t id, int rank, Request request) {
  return Packer()
      .number(id)
      .number(static_cast<std::uint64_t>(rank))
      .number(static_cast<std::uint64_t>(request));
}

std::uint64_t count(Milliseconds time) {
  return static_cast<std::uint64_t>(std::max<Milliseconds::rep>(0, time.count()));
}

std::string this_process() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return core::str("pid ", getpid(), " on ", host.data());
}

}  // namespace

StoreConnection::StoreConnection(const StoreAddress& address)
    : context_(std::make_unique<zmq::context_t>(1)),
      socket_(std::make_unique<zmq::socket_t>(*context_, zmq::socket_type::dealer)) {
  secure_client(*socket_, address.token);
  socket_->set(zmq::sockopt::linger, 500);
  socket_->set(zmq::sockopt::sndhwm, 0);
  socket_->set(zmq::sockopt::reconnect_ivl, 50);
  socket_->set(zmq::sockopt::reconnect_ivl_max, 500);
  socket_->connect(endpoint_of(address));
}

StoreConnection::~StoreConnection() = default;

void StoreConnection::send(std::string_view message) {
  socket_->send(zmq::buffer(message), zmq::send_flags::dontwait);
}

bool StoreConnection::receive(std::string& message, Milliseconds timeout, const Wakeup& wakeup) {
  zmq::message_t frame;
  if (!socket_->recv(frame, zmq::recv_flags::dontwait)) {
    zmq::pollitem_t items[] = {{socket_->handle(), 0, ZMQ_POLLIN, 0},
                               {nullptr, wakeup.fd(), ZMQ_POLLIN, 0}};
    poll(items, 2, timeout);
    if (!socket_->recv(frame, zmq::recv_flags::dontwait)) return false;
  }
  message = copy_message(frame);
  return true;
}

struct StoreClient::Answer {
  Reply reply = Reply::ok;
  std::string body;  // what follows the reply
};

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

/// Needs mutex_. Throws where the answer is not ok.
StoreClient::Answer StoreClient::request(std::string_view what, std::uint64_t id,
                                         const std::string& message, Milliseconds timeout) {
  throw_if_cancelled(what);
  connection_.send(message);
  const auto deadline = Clock::now() + timeout;
  std::string received;
  for (;;) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) break;
    const bool got = connection_.receive(received, left, cancelled_wakeup_);
    throw_if_cancelled(what);
    if (!got) continue;
    wire::Unpacker body(received);
    if (body.number() != id) continue;  // the late answer to a request that was given up
    Answer answer{static_cast<Reply>(body.number()), received.substr(16)};
    if (answer.reply == Reply::ok) return answer;
    const std::string reason = wire::Unpacker(answer.body).text();
    if (answer.reply == Reply::broken) throw GroupBroken(what, reason);
    core::fail<core::CommunicationError>(what, reason);
  }
  core::fail<core::CommunicationError>(
      what, "the store at ", to_string(address_), " did not answer within ",
      static_cast<double>(timeout.count()) / 1000.0,
      " s (is rank 0 running there? has it the same CAIRN_JOB_TOKEN?)");
}

void StoreClient::join(int world_size, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, rank_, Request::join)
                             .number(static_cast<std::uint64_t>(world_size))
                             .text(this_process())
                             .number(count(timeout));
  request("rendezvous", id, message.bytes(), timeout + Milliseconds(500));
}

void StoreClient::set(const std::string& key, std::string_view value) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  request("store", id, start(id, rank_, Request::set).text(key).text(value).bytes(), kAnswerTime);
}

std::string StoreClient::get(const std::string& key, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message = start(id, rank_, Request::get).text(key).number(count(timeout));
  return wire::Unpacker(request("store", id, message.bytes(), timeout + kMargin).body).text();
}

std::int64_t StoreClient::add(const std::string& key, std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const Packer message =
      start(id, rank_, Request::add).text(key).number(static_cast<std::uint64_t>(number));
  return std::stoll(wire::Unpacker(request("store", id, message.bytes(), kAnswerTime).body).text());
}

namespace {
std::string pack(std::uint64_t id, const Ledger::Report& report) {
  return start(id, report.rank, Request::report)
      .number(report.sequence)
      .text(report.description)
      .text(report.value)
      .number(count(report.timeout))
      .bytes();
}
}  // namespace

void StoreClient::report(const Ledger::Report& report) {
  const std::lock_guard lock(mutex_);
  throw_if_cancelled("store");
  connection_.send(pack(0, report));
}

std::vector<std::string> StoreClient::meet(const Ledger::Report& report) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  // The server ends the wait: report.timeout after the first rank came, which may be long before us
  // or never long after.
  const Answer answer = request("store", id, pack(id, report), report.timeout + kMargin);
  return wire::Unpacker(answer.body).texts();
}

void StoreClient::leave(std::uint64_t collectives, Milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  request("store", id, start(id, rank_, Request::leave).number(collectives).bytes(), timeout);
}

Milliseconds heartbeat_interval(Milliseconds heartbeat_timeout) {
  return std::clamp(heartbeat_timeout / 8, Milliseconds(50), Milliseconds(500));
}

Watchdog::Watchdog(const StoreAddress& address, int rank, Milliseconds heartbeat_timeout,
                   std::function<void(const std::string&)> on_failure,
                   std::function<std::string()> check)
    : address_(address),
      rank_(rank),
      heartbeat_timeout_(heartbeat_timeout),
      on_failure_(std::move(on_failure)),
      check_(std::move(check)),
      connection_(address),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  stop_ = true;
  wakeup_.signal();
  thread_.join();
}

void Watchdog::break_group(const std::string& reason) {
  {
    const std::lock_guard lock(reason_mutex_);
    reason_ = reason;
  }
  wakeup_.signal();
}

void Watchdog::check_devices() {
  const std::string trouble = check_ ? check_() : "";
  if (trouble.empty()) return;
  const auto now = Clock::now();
  trouble_since_ = std::min(trouble_since_, now);
  if (now - trouble_since_ >= kPrecedence) break_group(trouble);
}

void Watchdog::send_reason() {
  wakeup_.clear();
  const std::lock_guard lock(reason_mutex_);
  if (!reason_.empty()) connection_.send(start(0, rank_, Request::fail).text(reason_).bytes());
  reason_.clear();
}

void Watchdog::run() {
  const std::string beat = start(0, rank_, Request::beat).bytes();
  const auto interval = heartbeat_interval(heartbeat_timeout_);
  bool heard = false;
  auto last_heard = Clock::now(), next_beat = last_heard;
  std::string message;
  while (!stop_) {
    send_reason();
    const auto now = Clock::now();
    if (now >= next_beat) {
      connection_.send(beat);
      next_beat = now + interval;
      check_devices();
    }
    if (connection_.receive(message, std::chrono::ceil<Milliseconds>(next_beat - now), wakeup_)) {
      heard = true;
      last_heard = Clock::now();
      wire::Unpacker body(message);
      body.number();
      if (static_cast<Reply>(body.number()) == Reply::broken) return on_failure_(body.text());
    } else if (heard && Clock::now() - last_heard >= heartbeat_timeout_) {
      return on_failure_(core::str("rank 0 died: its store at ", to_string(address_),
                                   " has given no sign of life for ",
                                   static_cast<double>(heartbeat_timeout_.count()) / 1000.0, " s"));
    }
  }
  send_reason();
}

}  // namespace cairn::parallel
