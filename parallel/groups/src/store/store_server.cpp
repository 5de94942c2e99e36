#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
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

constexpr auto kTick = Milliseconds(100);

/// Whom to answer.
struct Asker {
  std::string identity;
  std::uint64_t id = 0;
};

std::uint64_t random_number() {
  std::random_device source;
  return std::uint64_t{source()} << 32 | source();
}

}  // namespace

class StoreServer::Loop {
 public:
  Loop(zmq::socket_t socket, int world_size, std::uint64_t group, int stop)
      : socket_(std::move(socket)), world_size_(world_size), group_(group), stop_(stop) {}

  void run();

 private:
  struct Joined {
    Asker asker;
    std::string run, host;
    Clock::time_point deadline;
  };
  struct Waiting {
    Asker asker;
    std::string key;
    Clock::time_point deadline;
  };
  struct Added {
    std::uint64_t id = 0;
    std::string sum;
  };

  void receive_all();
  void handle(const std::string& identity, std::string_view message);
  /// False: it is another group's, and was told so.
  bool is_of_this_group(const Asker& asker, int rank, std::uint64_t group);
  bool all_joined() const { return static_cast<int>(joined_.size()) == world_size_; }
  /// Whether the rank may stand where another process does; if not, it was told so.
  bool may_replace(const Joined& before, int rank, const Joined& own);
  void on_join(const Asker& asker, int rank, wire::Unpacker& body);
  void on_set(const Asker& asker, wire::Unpacker& body);
  void on_get(const Asker& asker, wire::Unpacker& body);
  void on_add(const Asker& asker, int rank, wire::Unpacker& body);
  void store(const std::string& key, std::string value);

  void answer_joined(Reply reply, const std::string& text);
  void check_joins();
  void check_gets();
  std::string missing_joins() const;
  void answer(const Asker& asker, Reply reply, std::string_view text);

  zmq::socket_t socket_;
  int world_size_;
  std::uint64_t group_;
  int stop_;
  std::uint64_t job_ = random_number();
  std::map<int, Joined> joined_;
  std::set<std::pair<int, std::string>> replaced_;  // ranks, and the runs of which they were
  std::string refusal_;  // of every join, once one rank had waited too long
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<int, Added> added_;  // each rank's last one
  std::vector<Waiting> gets_;
};

void StoreServer::Loop::run() {
  zmq::pollitem_t items[] = {{socket_.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, stop_, ZMQ_POLLIN, 0}};
  for (;;) {
    poll(items, 2, kTick);
    if (items[1].revents != 0) return;
    receive_all();
    check_joins();
    check_gets();
  }
}

void StoreServer::Loop::receive_all() {
  zmq::message_t identity, message;
  while (receive_frame(socket_, identity)) {
    if (!identity.more() || !receive_frame(socket_, message) || message.more()) continue;
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
  const std::uint64_t group = body.number();
  if (rank < 0 || rank >= world_size_) {
    return answer(asker, Reply::refused,
                  core::str("rank ", rank, " is not below rank 0's WORLD_SIZE, ", world_size_));
  }
  if (!is_of_this_group(asker, rank, group)) return;
  switch (request) {
    case Request::join:
      return on_join(asker, rank, body);
    case Request::set:
      return on_set(asker, body);
    case Request::get:
      return on_get(asker, body);
    case Request::add:
      return on_add(asker, rank, body);
  }
}

bool StoreServer::Loop::is_of_this_group(const Asker& asker, int rank, std::uint64_t group) {
  if (group == group_) return true;
  const bool comes = group > group_;
  answer(asker, comes ? Reply::not_yet : Reply::refused,
         core::str("rank ", rank, " makes group ", group, " of its process, rank 0 ",
                   comes ? "is still in group " : "has come to group ", group_,
                   " (every process makes the same groups, one after the other)"));
  return false;
}

void StoreServer::Loop::on_join(const Asker& asker, int rank, wire::Unpacker& body) {
  const auto world_size = static_cast<int>(body.number());
  Joined own{asker, body.text(), "", {}};
  own.host = body.text();
  const std::string contact = body.text();
  own.deadline = Clock::now() + Milliseconds(body.number());
  if (world_size != world_size_) {
    return answer(asker, Reply::refused,
                  core::str("rank ", rank, " has WORLD_SIZE=", world_size,
                            ", rank 0 has WORLD_SIZE=", world_size_));
  }
  const auto [it, is_new] = joined_.try_emplace(rank, own);
  Joined& joined = it->second;
  if (joined.host != own.host || joined.run != own.run) {
    if (!may_replace(joined, rank, own)) return;
    replaced_.emplace(rank, joined.run);
    joined = own;
  }
  joined.asker = asker;  // it may ask again, over a new connection
  if (!refusal_.empty()) return answer(asker, Reply::refused, refusal_);
  store(StoreClient::contact_key(rank), contact);
  if (all_joined()) answer_joined(Reply::ok, std::to_string(job_));
}

/// Each start of a launcher counts for itself, so only the order in which they come tells which is
/// the later one.
bool StoreServer::Loop::may_replace(const Joined& before, int rank, const Joined& own) {
  if (own.run.empty() || own.run == before.run || replaced_.contains({rank, own.run})) {
    answer(own.asker, Reply::refused,
           core::str("two processes have RANK=", rank, ": ", before.host, " and ", own.host));
    return false;
  }
  if (!all_joined()) return true;
  answer(own.asker, Reply::not_yet,
         core::str("rank ", rank, " (", own.host, ") was started again, but the group to which ",
                   before.host, " belonged has not ended (rank 0's cairn-run starts it again, ",
                   "with --max-restarts)"));
  return false;
}

void StoreServer::Loop::answer_joined(Reply reply, const std::string& text) {
  for (const auto& [rank, joined] : joined_) answer(joined.asker, reply, text);
}

void StoreServer::Loop::store(const std::string& key, std::string value) {
  const std::string& stored = values_[key] = std::move(value);
  std::erase_if(gets_, [&](const Waiting& waiting) {
    if (waiting.key != key) return false;
    answer(waiting.asker, Reply::ok, stored);
    return true;
  });
}

void StoreServer::Loop::on_set(const Asker& asker, wire::Unpacker& body) {
  const std::string key = body.text();
  store(key, body.text());
  answer(asker, Reply::ok, "");
}

void StoreServer::Loop::on_get(const Asker& asker, wire::Unpacker& body) {
  const std::string key = body.text();
  const Milliseconds timeout(body.number());
  if (const auto found = values_.find(key); found != values_.end()) {
    return answer(asker, Reply::ok, found->second);
  }
  const bool asked_again = std::any_of(gets_.begin(), gets_.end(), [&](const Waiting& waiting) {
    return waiting.asker.identity == asker.identity && waiting.asker.id == asker.id;
  });
  if (!asked_again) gets_.push_back({asker, key, Clock::now() + timeout});  // once: its time runs
}

void StoreServer::Loop::on_add(const Asker& asker, int rank, wire::Unpacker& body) {
  const std::string key = body.text();
  Added& added = added_[rank];
  if (added.id == asker.id) return answer(asker, Reply::ok, added.sum);  // asked again
  std::int64_t sum = static_cast<std::int64_t>(body.number());
  if (const auto found = values_.find(key); found != values_.end()) {
    std::int64_t before = 0;
    const char* end = found->second.data() + found->second.size();
    if (std::from_chars(found->second.data(), end, before).ptr != end) {
      return answer(asker, Reply::refused, "'" + key + "' holds no number");
    }
    sum += before;
  }
  added = {asker.id, std::to_string(sum)};
  store(key, added.sum);
  answer(asker, Reply::ok, added.sum);
}

std::string StoreServer::Loop::missing_joins() const {
  std::string text;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!joined_.contains(rank)) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

void StoreServer::Loop::check_joins() {
  if (!refusal_.empty() || all_joined()) return;
  const auto now = Clock::now();
  const bool late = std::any_of(joined_.begin(), joined_.end(),
                                [&](const auto& joined) { return now >= joined.second.deadline; });
  if (!late) return;
  refusal_ =
      core::str("of ", world_size_, " ranks (WORLD_SIZE) these never came: ", missing_joins(),
                descriptor_hint());
  answer_joined(Reply::refused, refusal_);
}

void StoreServer::Loop::check_gets() {
  const auto now = Clock::now();
  std::erase_if(gets_, [&](const Waiting& waiting) {
    if (now < waiting.deadline) return false;
    answer(waiting.asker, Reply::timeout, "nobody set '" + waiting.key + "' in time");
    return true;
  });
}

void StoreServer::Loop::answer(const Asker& asker, Reply reply, std::string_view text) {
  send_to(socket_, asker.identity,
          Packer().number(asker.id).number(static_cast<std::uint64_t>(reply)).text(text).bytes());
}

StoreServer::StoreServer(const StoreAddress& address, int world_size, std::uint64_t group)
    : context_(std::make_unique<zmq::context_t>(1)) {
  const BlockedSignals blocked;
  zmq::socket_t socket = open_socket(*context_, zmq::socket_type::router);
  secure_server(socket, address.token);
  prepare(socket);
  port_ = listen(socket, address);
  loop_ = std::make_unique<Loop>(std::move(socket), world_size, group, stop_.fd());
  thread_ = std::thread([this] { loop_->run(); });
}

StoreServer::~StoreServer() {
  stop_.signal();
  thread_.join();
}

}  // namespace cairn::parallel
