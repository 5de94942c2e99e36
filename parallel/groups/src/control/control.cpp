#include "control/control.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "store/store_socket.h"

namespace cairn::parallel {
namespace {

// How long somebody's death has to be known before a device's trouble, which follows from it, is
// the reason.
constexpr auto kPrecedence = Milliseconds(2000);
// Who wakes so much later was stopped, with its machine or by a shell's Ctrl-Z.
constexpr auto kPause = Milliseconds(1000);

}  // namespace

/// The connections with the parent and with the children. Messages that cannot be sent or read are
/// as good as lost: the next heartbeat repeats them.
class Control::Sockets {
 public:
  Sockets(const std::string& master_addr, const std::string& token, bool has_children)
      : token_(token) {
    if (!has_children) return;
    const BlockedSignals blocked;
    down_ = open_socket(context_, zmq::socket_type::router);
    secure_server(down_, token);
    prepare(down_);
    port_ = listen(down_, {master_addr, 0, token});
  }

  int port() const { return port_; }
  void connect(const StoreAddress& parent) {
    up_ = open_socket(context_, zmq::socket_type::dealer);
    secure_client(up_, token_);
    prepare(up_);
    up_.set(zmq::sockopt::reconnect_ivl, 50);
    up_.set(zmq::sockopt::reconnect_ivl_max, 500);
    zmq_socket_monitor(up_.handle(), "inproc://parent",
                       ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED);
    events_ = open_socket(context_, zmq::socket_type::pair);
    events_.connect("inproc://parent");
    up_.connect(endpoint_of(parent));
  }
  ~Sockets() {
    if (up_) zmq_socket_monitor(up_.handle(), nullptr, 0);
  }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  void wait(int wakeup, Milliseconds timeout) {
    std::array<zmq::pollitem_t, 4> items{{{nullptr, wakeup, ZMQ_POLLIN, 0}}};
    std::size_t count = 1;
    for (zmq::socket_t* socket : {&up_, &down_, &events_}) {
      if (*socket) items[count++] = {socket->handle(), 0, ZMQ_POLLIN, 0};
    }
    poll(items.data(), count, timeout);
  }

  /// f(bytes) for each message of the parent.
  template <class F>
  void from_parent(F f) {
    zmq::message_t message;
    while (up_ && receive_frame(up_, message)) f(copy_message(message));
  }
  /// f(identity, bytes) for each message of a child.
  template <class F>
  void from_children(F f) {
    zmq::message_t identity, message;
    while (down_ && receive_frame(down_, identity)) {
      if (!identity.more() || !receive_frame(down_, message) || message.more()) continue;
      f(copy_message(identity), copy_message(message));
    }
  }
  /// Whether the connection with the parent was closed (false) or made (true) since the last call.
  std::optional<bool> parent_connected() {
    std::optional<bool> connected;
    zmq::message_t event, address;
    while (events_ && receive_frame(events_, event)) {
      if (event.more()) receive_frame(events_, address);
      std::uint16_t number = 0;
      std::memcpy(&number, event.data(), std::min(sizeof number, event.size()));
      connected = number != ZMQ_EVENT_DISCONNECTED;
    }
    return connected;
  }

  void to_parent(const std::string& bytes) {
    if (up_) zmq_send(up_.handle(), bytes.data(), bytes.size(), ZMQ_DONTWAIT);
  }
  /// False where the child is not connected.
  bool to_child(const std::string& identity, const std::string& bytes) {
    return send_to(down_, identity, bytes);
  }

  std::map<int, std::string> identities;  // of the children that were heard

 private:
  std::string token_;
  int port_ = 0;
  zmq::context_t context_{1};
  zmq::socket_t up_, down_, events_;
};

Control::Control(Options options)
    : options_(std::move(options)),
      sockets_(std::make_unique<Sockets>(
          options_.master_addr, options_.token,
          !ControlNode::children_of(options_.rank, options_.world_size).empty())) {
  port_ = sockets_->port();
}

Control::~Control() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wakeup_.signal();
  thread_.join();
}

void Control::start(std::uint64_t job, const StoreAddress& parent) {
  job_ = job;
  node_ = std::make_unique<ControlNode>(
      options_.rank, options_.world_size, this_process(), options_.heartbeat_timeout,
      ControlNode::probes_of([this] { return histories(); }), Clock::now());
  {
    const BlockedSignals blocked;
    if (options_.rank != 0) sockets_->connect(parent);
    thread_ = std::thread([this] { run(); });
  }
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, 4 * options_.heartbeat_timeout, [&] { return heard_; });
}

std::vector<std::shared_ptr<History>> Control::histories() {
  const std::lock_guard lock(mutex_);
  return histories_;
}

void Control::add(const std::shared_ptr<History>& history) {
  const std::lock_guard lock(mutex_);
  histories_.push_back(history);
}

void Control::break_job(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  wakeup_.signal();
}

void Control::leave() {
  constexpr auto kSilent = Milliseconds(10'000);
  std::unique_lock lock(mutex_);
  leaving_ = true;
  wakeup_.signal();
  const auto gone = [&] { return gone_; };
  if (changed_.wait_for(lock, kSilent, gone)) return;
  log::info("rank {} has left its group and stays until the ranks that it serves have, too",
            options_.rank);
  changed_.wait(lock, gone);
}

/// Histories whose group has ended on this rank become a line in the node's memory.
void Control::collect_left() {
  const std::lock_guard lock(mutex_);
  std::erase_if(histories_, [&](const auto& history) {
    const auto left = history->left();
    if (left) node_->leave(*left);
    return left.has_value();
  });
}

void Control::take_orders() {
  wakeup_.clear();
  collect_left();
  const std::lock_guard lock(mutex_);
  if (!reason_.empty()) node_->fail(reason_);
  if (std::exchange(leaving_, false)) node_->leave();
}

void Control::receive(Clock::time_point now) {
  const auto body_of = [&](const std::string& bytes) -> std::optional<std::string> {
    wire::Unpacker message(bytes);
    if (message.number() != job_) return std::nullopt;  // of another job, or of an earlier life
    return std::string(message.rest());
  };
  const auto read = [](auto f) {
    try {
      f();
    } catch (const core::Error&) {  // not one of ours
    }
  };
  sockets_->from_parent([&](const std::string& bytes) {
    read([&] {
      if (const auto body = body_of(bytes))
        node_->hear(ControlNode::ParentMessage::unpack(*body), now);
    });
  });
  sockets_->from_children([&](const std::string& identity, const std::string& bytes) {
    read([&] {
      const auto body = body_of(bytes);
      if (!body) return;
      const auto report = ControlNode::Report::unpack(*body);
      const auto children = ControlNode::children_of(options_.rank, options_.world_size);
      if (std::find(children.begin(), children.end(), report.rank) == children.end()) return;
      node_->hear(report, now);
      sockets_->identities[report.rank] = identity;
    });
  });
  if (const auto connected = sockets_->parent_connected()) {
    node_->set_connected(-1, *connected, now);
  }
}

void Control::send(Clock::time_point now) {
  const std::string job = wire::Packer().number(job_).bytes();
  const int parent = ControlNode::parent_of(options_.rank);
  for (const ControlNode::ControlMessage& message : node_->take_messages(now)) {
    ++messages_;
    bytes_ += message.bytes.size();
    if (message.to == parent) {
      sockets_->to_parent(job + message.bytes);
      continue;
    }
    const bool connected =
        sockets_->to_child(sockets_->identities[message.to], job + message.bytes);
    node_->set_connected(message.to, connected, now);
  }
}

void Control::watch_devices(Clock::time_point now) {
  const std::string trouble = options_.check_devices ? options_.check_devices() : "";
  if (trouble.empty()) return;
  trouble_since_ = std::min(trouble_since_, now);
  if (now - trouble_since_ >= kPrecedence) node_->fail(trouble);
}

void Control::run() {
  bool told = false;
  for (auto due = Clock::now();;) {
    const auto now = Clock::now();
    if (now - due > kPause) {
      node_->slept(now - due);
      for (const auto& history : histories()) history->slept(now - due);
    }
    take_orders();
    receive(now);
    if (now >= node_->next_heartbeat()) watch_devices(now);
    node_->tick(now);
    send(now);
    if (!told && !node_->failure().empty()) {
      told = true;
      if (options_.on_failure) options_.on_failure(node_->failure());
    }
    {
      const std::lock_guard lock(mutex_);
      gone_ = node_->may_go();
      heard_ = node_->is_heard();
      if (gone_ || heard_) changed_.notify_all();
      if (stop_) return;
    }
    constexpr Clock::duration kLook = Milliseconds(100);  // at this rank's own collectives
    const auto left = std::clamp(node_->next_heartbeat() - Clock::now(), Clock::duration{}, kLook);
    due = Clock::now() + left;
    sockets_->wait(wakeup_.fd(), std::chrono::ceil<Milliseconds>(left));
  }
}

}  // namespace cairn::parallel
