#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <map>
#include <unordered_map>
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

constexpr auto kTick = Milliseconds(100);
constexpr auto kLeastSilence = Milliseconds(1000);  // before a closed connection counts as a death

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

/// Whom to answer.
struct Asker {
  std::string identity;
  std::uint64_t id = 0;
};

}  // namespace

class StoreServer::Loop {
 public:
  Loop(zmq::socket_t socket, int world_size, Milliseconds heartbeat_timeout, int stop)
      : socket_(std::move(socket)),
        world_size_(world_size),
        heartbeat_timeout_(heartbeat_timeout),
        stop_(stop),
        ledger_(world_size) {}

  void run();
  void wait_for_others(Milliseconds timeout) const;

 private:
  struct Joined {
    Asker asker;
    std::string host;
    Clock::time_point deadline;
  };
  struct Waiting {
    Asker asker;
    std::string key;
    Clock::time_point deadline;
  };
  struct Watched {
    std::string identity;
    Clock::time_point last_beat;
    bool connected = true;
  };

  void receive_all();
  void handle(const std::string& identity, std::string_view message);
  void on_join(const Asker& asker, int rank, wire::Unpacker& body);
  void on_set(const Asker& asker, wire::Unpacker& body);
  void on_get(const Asker& asker, wire::Unpacker& body);
  void on_add(const Asker& asker, wire::Unpacker& body);
  void on_report(const Asker& asker, int rank, wire::Unpacker& body);
  void on_leave(const Asker& asker, int rank, wire::Unpacker& body);
  void on_beat(const Asker& asker, int rank);
  void store(const std::string& key, std::string value);

  void check_complete();
  void check_watched();
  void check_joins();
  void check_gets();
  void spread_failure();
  std::string missing_joins() const;

  bool send(const std::string& identity, const std::string& message);
  void answer(const Asker& asker, Reply reply, const std::string& body);
  void answer_text(const Asker& asker, Reply reply, std::string_view text) {
    answer(asker, reply, Packer().text(text).bytes());
  }

  zmq::socket_t socket_;
  int world_size_;
  Milliseconds heartbeat_timeout_;
  int stop_;
  std::map<int, Joined> joined_;
  bool complete_ = false;  // every rank has joined
  std::unordered_map<std::string, std::string> values_;
  std::vector<Waiting> gets_;
  std::multimap<std::uint64_t, Asker> meets_;
  std::map<int, Watched> watched_;
  bool failure_spread_ = false;

  Ledger ledger_;
  mutable std::mutex done_mutex_;  // done_, shared with wait_for_others
  mutable std::condition_variable done_changed_;
  bool done_ = false;  // every rank but 0 has left, or the group is broken
};

void StoreServer::Loop::run() {
  zmq::pollitem_t items[] = {{socket_.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, stop_, ZMQ_POLLIN, 0}};
  for (;;) {
    poll(items, 2, kTick);
    if (items[1].revents != 0) return;
    receive_all();
    ledger_.check_deadlines(Clock::now());
    check_joins();
    check_gets();
    check_watched();
    spread_failure();
    if (ledger_.failure().empty() &&
        ledger_.left_count() < world_size_ - (ledger_.has_left(0) ? 0 : 1))
      continue;
    const std::lock_guard lock(done_mutex_);
    done_ = true;
    done_changed_.notify_all();
  }
}

void StoreServer::Loop::wait_for_others(Milliseconds timeout) const {
  std::unique_lock lock(done_mutex_);
  done_changed_.wait_for(lock, timeout, [&] { return done_; });
}

void StoreServer::Loop::receive_all() {
  zmq::message_t identity, message;
  while (socket_.recv(identity, zmq::recv_flags::dontwait)) {
    if (!identity.more() || !socket_.recv(message) || message.more()) continue;
    try {
      handle(copy_message(identity), copy_message(message));
    } catch (const core::Error&) {  // not one of our messages: it gets no answer
    }
  }
}

void StoreServer::Loop::handle(const std::string& identity, std::string_view message) {
  wire::Unpacker body(message);
  const Asker asker{identity, body.number()};
  const auto rank = static_cast<int>(body.number());
  const auto request = static_cast<Request>(body.number());
  if (rank < 0 || rank >= world_size_) {
    return answer_text(
        asker, Reply::refused,
        core::str("rank ", rank, " is not below rank 0's WORLD_SIZE, ", world_size_));
  }
  switch (request) {
    case Request::join:
      return on_join(asker, rank, body);
    case Request::set:
      return on_set(asker, body);
    case Request::get:
      return on_get(asker, body);
    case Request::add:
      return on_add(asker, body);
    case Request::report:
      return on_report(asker, rank, body);
    case Request::leave:
      return on_leave(asker, rank, body);
    case Request::fail:
      return ledger_.fail(body.text());
    case Request::beat:
      return on_beat(asker, rank);
  }
}

void StoreServer::Loop::on_join(const Asker& asker, int rank, wire::Unpacker& body) {
  const auto world_size = static_cast<int>(body.number());
  const std::string host = body.text();
  const Milliseconds timeout(body.number());
  if (world_size != world_size_) {
    return answer_text(asker, Reply::refused,
                       core::str("rank ", rank, " has WORLD_SIZE=", world_size,
                                 ", rank 0 has WORLD_SIZE=", world_size_));
  }
  const auto [it, is_new] = joined_.try_emplace(rank, Joined{asker, host, Clock::now() + timeout});
  if (!is_new) {
    return answer_text(
        asker, Reply::refused,
        core::str("two processes have RANK=", rank, ": ", it->second.host, " and ", host));
  }
  check_complete();
}

/// Ranks may start when all have joined and all can be told of a failure.
void StoreServer::Loop::check_complete() {
  const auto all = static_cast<std::size_t>(world_size_);
  if (complete_ || joined_.size() < all || watched_.size() < all) return;
  complete_ = true;
  for (const auto& [rank, joined] : joined_) answer_text(joined.asker, Reply::ok, "");
}

void StoreServer::Loop::store(const std::string& key, std::string value) {
  const std::string& stored = values_[key] = std::move(value);
  std::erase_if(gets_, [&](const Waiting& waiting) {
    if (waiting.key != key) return false;
    answer_text(waiting.asker, Reply::ok, stored);
    return true;
  });
}

void StoreServer::Loop::on_set(const Asker& asker, wire::Unpacker& body) {
  const std::string key = body.text();
  store(key, body.text());
  answer_text(asker, Reply::ok, "");
}

void StoreServer::Loop::on_get(const Asker& asker, wire::Unpacker& body) {
  const std::string key = body.text();
  const Milliseconds timeout(body.number());
  if (const auto found = values_.find(key); found != values_.end())
    return answer_text(asker, Reply::ok, found->second);
  if (!ledger_.failure().empty()) return answer_text(asker, Reply::broken, ledger_.failure());
  gets_.push_back({asker, key, Clock::now() + timeout});
}

void StoreServer::Loop::on_add(const Asker& asker, wire::Unpacker& body) {
  const std::string key = body.text();
  std::int64_t sum = static_cast<std::int64_t>(body.number());
  if (const auto found = values_.find(key); found != values_.end()) {
    std::int64_t before = 0;
    const char* end = found->second.data() + found->second.size();
    if (std::from_chars(found->second.data(), end, before).ptr != end) {
      return answer_text(asker, Reply::refused, "'" + key + "' holds no number");
    }
    sum += before;
  }
  store(key, std::to_string(sum));
  answer_text(asker, Reply::ok, std::to_string(sum));
}

void StoreServer::Loop::on_report(const Asker& asker, int rank, wire::Unpacker& body) {
  Ledger::Report report;
  report.rank = rank;
  report.sequence = body.number();
  report.description = body.text();
  report.value = body.text();
  report.timeout = Milliseconds(body.number());
  const auto complete = ledger_.report(report, Clock::now());
  if (!ledger_.failure().empty()) return answer_text(asker, Reply::broken, ledger_.failure());
  if (asker.id != 0) meets_.emplace(report.sequence, asker);
  if (!complete) return;
  const std::string values = Packer().texts(complete->values).bytes();
  const auto [first, last] = meets_.equal_range(complete->sequence);
  for (auto it = first; it != last; ++it) answer(it->second, Reply::ok, values);
  meets_.erase(first, last);
}

void StoreServer::Loop::on_leave(const Asker& asker, int rank, wire::Unpacker& body) {
  ledger_.leave(rank, body.number());
  watched_.erase(rank);
  answer_text(asker, Reply::ok, "");
}

void StoreServer::Loop::on_beat(const Asker& asker, int rank) {
  if (!ledger_.has_left(rank)) watched_[rank] = {asker.identity, Clock::now(), true};
  check_complete();
  const bool broken = !ledger_.failure().empty();
  send(asker.identity, Packer()
                           .number(0)
                           .number(static_cast<std::uint64_t>(broken ? Reply::broken : Reply::ok))
                           .text(ledger_.failure())
                           .bytes());
}

void StoreServer::Loop::check_watched() {
  const auto now = Clock::now();
  const auto least =
      std::max<Clock::duration>(kLeastSilence, 2 * heartbeat_interval(heartbeat_timeout_));
  const std::string probe =
      Packer().number(0).number(static_cast<std::uint64_t>(Reply::ok)).text("").bytes();
  for (auto& [rank, watched] : watched_) {
    const auto silence = now - watched.last_beat;
    if (silence >= least && watched.connected) watched.connected = send(watched.identity, probe);
    const bool gone = silence >= least && !watched.connected;
    if (!gone && silence < heartbeat_timeout_) continue;
    const auto joined = joined_.find(rank);
    ledger_.fail(core::str("rank ", rank, " died",
                           joined == joined_.end() ? "" : " (" + joined->second.host + ")",
                           gone ? ": its connection closed, and it has given" : ": it has given",
                           " no sign of life for ", seconds(silence), " s"));
  }
}

std::string StoreServer::Loop::missing_joins() const {
  // Where everybody has joined, it is a watchdog that is missing.
  const bool all_joined = static_cast<int>(joined_.size()) == world_size_;
  std::string text;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (all_joined ? watched_.contains(rank) : joined_.contains(rank)) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

void StoreServer::Loop::check_joins() {
  if (complete_) return;
  const auto now = Clock::now();
  for (const auto& [rank, joined] : joined_) {
    if (now < joined.deadline) continue;
    ledger_.fail(
        core::str("of ", world_size_, " ranks (WORLD_SIZE) these never came: ", missing_joins()));
  }
}

void StoreServer::Loop::check_gets() {
  const auto now = Clock::now();
  std::erase_if(gets_, [&](const Waiting& waiting) {
    if (now < waiting.deadline) return false;
    answer_text(waiting.asker, Reply::timeout, "nobody set '" + waiting.key + "' in time");
    return true;
  });
}

void StoreServer::Loop::spread_failure() {
  if (ledger_.failure().empty() || failure_spread_) return;
  failure_spread_ = true;
  const std::string& reason = ledger_.failure();
  for (const auto& waiting : gets_) answer_text(waiting.asker, Reply::broken, reason);
  for (const auto& [sequence, asker] : meets_) answer_text(asker, Reply::broken, reason);
  if (!complete_) {
    for (const auto& [rank, joined] : joined_) answer_text(joined.asker, Reply::broken, reason);
  }
  gets_.clear();
  meets_.clear();
  const std::string push =
      Packer().number(0).number(static_cast<std::uint64_t>(Reply::broken)).text(reason).bytes();
  for (const auto& [rank, watched] : watched_) send(watched.identity, push);
}

/// False where nobody is connected under that identity any more.
bool StoreServer::Loop::send(const std::string& identity, const std::string& message) {
  if (zmq_send(socket_.handle(), identity.data(), identity.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
    return zmq_errno() == EAGAIN;
  zmq_send(socket_.handle(), message.data(), message.size(), ZMQ_DONTWAIT);
  return true;
}

void StoreServer::Loop::answer(const Asker& asker, Reply reply, const std::string& body) {
  if (asker.id == 0) return;
  send(asker.identity,
       Packer().number(asker.id).number(static_cast<std::uint64_t>(reply)).bytes() + body);
}

StoreServer::StoreServer(const StoreAddress& address, int world_size,
                         Milliseconds heartbeat_timeout)
    : context_(std::make_unique<zmq::context_t>(1)) {
  const std::string endpoint = endpoint_of(address);
  zmq::socket_t socket(*context_, zmq::socket_type::router);
  secure_server(socket, address.token);
  socket.set(zmq::sockopt::router_mandatory, true);
  socket.set(zmq::sockopt::linger, 500);
  socket.set(zmq::sockopt::sndhwm, 0);
  socket.set(zmq::sockopt::rcvhwm, 0);
  if (zmq_bind(socket.handle(), endpoint.c_str()) != 0) {
    const int error = zmq_errno();
    const char* hint =
        error == EADDRINUSE
            ? "another job? set MASTER_PORT to a free port, or let cairn-run choose one"
        : error == EADDRNOTAVAIL
            ? "MASTER_ADDR must be an address of the machine that rank 0 runs on"
            : "see MASTER_ADDR and MASTER_PORT";
    core::fail<core::CommunicationError>(
        "store", "cannot listen at ", to_string(address), ": ",
        error == EADDRINUSE ? core::str("port ", address.port, " is in use") : zmq_strerror(error),
        " (", hint, ")");
  }
  const std::string bound = socket.get(zmq::sockopt::last_endpoint);
  port_ = std::stoi(bound.substr(bound.rfind(':') + 1));
  loop_ = std::make_unique<Loop>(std::move(socket), world_size, heartbeat_timeout, stop_.fd());
  thread_ = std::thread([this] { loop_->run(); });
}

StoreServer::~StoreServer() {
  stop_.signal();
  thread_.join();
}

void StoreServer::wait_for_others(Milliseconds timeout) const {
  loop_->wait_for_others(timeout);
}

}  // namespace cairn::parallel
