#include <arpa/inet.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "cairn/core/error.h"
#include "collectives/gloo_backend.h"
#include "collectives/mesh.h"

namespace cairn::parallel {
namespace {

constexpr auto kForever = std::chrono::hours(24);  // the ledger's deadlines end a wait, by abort()

/// Gloo's way to our store.
class GlooStore : public gloo::rendezvous::Store {
 public:
  GlooStore(StoreClient& client, Milliseconds timeout) : client_(client), timeout_(timeout) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    client_.set("gloo/" + key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = client_.get("gloo/" + key, timeout_);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override {
    for (const std::string& key : keys) client_.get("gloo/" + key, timeout);
  }

 private:
  StoreClient& client_;
  Milliseconds timeout_;
};

/// Gloo writes to sockets that a dead peer has closed; that must be an error, not a signal that
/// ends the process. Threads started inside keep SIGPIPE blocked.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (sigismember(&before_, SIGPIPE) != 0) return;
    const timespec now{};
    while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

/// This machine's address on the way to the host: a connected UDP socket knows it, without sending
/// anything.
std::string local_address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0)
    core::fail<core::CommunicationError>("gloo", "cannot resolve MASTER_ADDR '", host, "'");
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  const bool known = connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(fd);
  std::array<char, NI_MAXHOST> numeric{};
  if (!known || getnameinfo(reinterpret_cast<sockaddr*>(&address), length, numeric.data(),
                            numeric.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    core::fail<core::CommunicationError>("gloo", "this machine has no route to MASTER_ADDR '", host,
                                         "'");
  }
  return numeric.data();
}

/// Runs f; Gloo's errors become ours.
template <class F>
void translate(F&& f) {
  const NoSigpipe guard;
  try {
    f();
  } catch (const core::Error&) {
    throw;
  } catch (const std::exception& error) {
    core::fail<core::CommunicationError>("gloo", error.what());
  }
}

using Buffer = gloo::transport::UnboundBuffer;

/// The buffers under way, so that another thread can end their waits.
class OpenBuffers {
 public:
  void add(Buffer* buffer) {
    const std::lock_guard lock(mutex_);
    open_.insert(buffer);
  }
  void remove(Buffer* buffer) {
    const std::lock_guard lock(mutex_);
    open_.erase(buffer);
  }
  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (Buffer* buffer : open_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
  bool aborted() const { return aborted_; }

 private:
  std::mutex mutex_;
  std::set<Buffer*> open_;
  std::atomic<bool> aborted_ = false;
};

class GlooTransfer : public Mesh::Transfer {
 public:
  explicit GlooTransfer(OpenBuffers& open) : open_(open) {}
  ~GlooTransfer() override;
  /// Not in the constructor: it may throw, and then the buffers must still be taken off the list.
  void start(gloo::Context& context, std::uint64_t tag, const std::vector<Mesh::Send>& sends,
             const std::vector<Mesh::Receive>& receives);
  void wait() override;

 private:
  Buffer& add(gloo::Context& context, const void* data, std::size_t bytes,
              std::vector<std::unique_ptr<Buffer>>& to);
  void check(bool done) const {
    if (!done || open_.aborted())
      core::fail<core::CommunicationError>("gloo", "the collective was aborted");
  }

  OpenBuffers& open_;
  std::vector<std::unique_ptr<Buffer>> in_, out_;
};

void GlooTransfer::start(gloo::Context& context, std::uint64_t tag,
                         const std::vector<Mesh::Send>& sends,
                         const std::vector<Mesh::Receive>& receives) {
  for (const Mesh::Receive& receive : receives)
    add(context, receive.data, receive.bytes, in_).recv(receive.from, tag);
  for (const Mesh::Send& send : sends) add(context, send.data, send.bytes, out_).send(send.to, tag);
}

GlooTransfer::~GlooTransfer() {
  for (const auto& buffer : in_) open_.remove(buffer.get());
  for (const auto& buffer : out_) open_.remove(buffer.get());
}

Buffer& GlooTransfer::add(gloo::Context& context, const void* data, std::size_t bytes,
                          std::vector<std::unique_ptr<Buffer>>& to) {
  to.push_back(context.createUnboundBuffer(const_cast<void*>(data), bytes));
  open_.add(to.back().get());
  return *to.back();
}

void GlooTransfer::wait() {
  translate([&] {
    for (const auto& buffer : in_) check(!open_.aborted() && buffer->waitRecv(nullptr, kForever));
    for (const auto& buffer : out_) check(!open_.aborted() && buffer->waitSend(nullptr, kForever));
  });
}

class GlooMesh : public Mesh {
 public:
  explicit GlooMesh(const Membership& membership);
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    auto transfer = std::make_unique<GlooTransfer>(open_);
    translate([&] { transfer->start(*context_, tag(round), sends, receives); });
    return transfer;
  }
  void abort() noexcept override { open_.abort(); }

 private:
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  OpenBuffers open_;
};

GlooMesh::GlooMesh(const Membership& membership) : Mesh(membership.rank, membership.world_size) {
  const NoSigpipe guard;
  gloo::transport::tcp::attr attributes;
  attributes.hostname = local_address_towards(membership.master_addr);
  device_ = gloo::transport::tcp::CreateDevice(attributes);
  context_ = std::make_shared<gloo::rendezvous::Context>(membership.rank, membership.world_size);
  context_->setTimeout(membership.timeout);
  GlooStore store(*membership.store, membership.timeout);
  context_->connectFullMesh(store, device_);
}

}  // namespace

std::unique_ptr<Collectives> connect_gloo(const Membership& membership) {
  try {
    return make_mesh_collectives(std::make_unique<GlooMesh>(membership));
  } catch (const core::Error&) {
    throw;
  } catch (const std::exception& error) {
    core::fail<core::CommunicationError>("gloo", "rank ", membership.rank,
                                         " cannot connect to the others: ", error.what());
  }
}

}  // namespace cairn::parallel
