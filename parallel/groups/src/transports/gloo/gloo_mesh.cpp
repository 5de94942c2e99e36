#include <dirent.h>
#include <fcntl.h>
#include <gloo/config.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "store/store_socket.h"
#include "transports/authenticate.h"
#include "transports/gloo_backend.h"
#include "transports/mesh.h"

namespace cairn::parallel {
namespace {

/// Gloo's way to our store.
class GlooStore : public gloo::rendezvous::Store {
 public:
  GlooStore(parallel::Store& client, std::string prefix, Milliseconds timeout)
      : client_(client), prefix_(std::move(prefix)), timeout_(timeout) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    client_.set(prefix_ + key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = client_.get(prefix_ + key, timeout_);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) client_.get(prefix_ + key, timeout_);
  }
  /// Gloo gives a rank that comes late a fifth of what it gives the connection.
  void wait(const std::vector<std::string>& keys, const Milliseconds& /*fifth*/) override {
    wait(keys);
  }

 private:
  parallel::Store& client_;
  std::string prefix_;
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

/// This machine's address, for the other ranks. The machine that MASTER_ADDR means may know that as
/// loopback; it finds its own on the way to a rank elsewhere.
std::string own_address(const Membership& membership) {
  std::string own = address_towards(membership.master_addr);
  const auto all = share(membership, "gloo addresses", own);
  if (!own.empty()) return own;
  const auto elsewhere = std::find_if(all.begin(), all.end(),
                                      [](const std::string& address) { return !address.empty(); });
  return elsewhere == all.end() ? "127.0.0.1" : address_towards(*elsewhere);
}

std::set<int> open_descriptors() {
  std::set<int> all;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    all.insert(std::atoi(entry->d_name));
  }
  if (folder) all.erase(dirfd(folder.get()));
  return all;
}

/// Gloo's sockets would be inherited by programs that this process starts: one that outlives it
/// would keep its port and its connections open. Closes on exec what sockets and polls were opened
/// in a scope.
class ClosedOnExec {
 public:
  ~ClosedOnExec() {
    for (const int fd : open_descriptors()) {
      if (!before_.contains(fd) && is_of_gloos_kind(fd)) fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
  }
  ClosedOnExec() = default;
  ClosedOnExec(const ClosedOnExec&) = delete;
  ClosedOnExec& operator=(const ClosedOnExec&) = delete;

 private:
  static bool is_of_gloos_kind(int fd) {
    std::array<char, 64> target{};
    const std::string path = core::str("/proc/self/fd/", fd);
    if (readlink(path.c_str(), target.data(), target.size() - 1) < 0) return false;
    const std::string_view kind = target.data();
    return kind.starts_with("socket:") || kind == "anon_inode:[eventpoll]";
  }
  std::set<int> before_ = open_descriptors();
};

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
  void wait(Milliseconds timeout) override;

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

void GlooTransfer::wait(Milliseconds timeout) {
  translate([&] {
    for (const auto& buffer : in_) check(!open_.aborted() && buffer->waitRecv(nullptr, timeout));
    for (const auto& buffer : out_) check(!open_.aborted() && buffer->waitSend(nullptr, timeout));
  });
}

class GlooMesh : public Mesh {
 public:
  /// `name` tells attempts apart; `timeout` is that of each connection.
  GlooMesh(const Membership& membership, const std::string& address, const std::string& name,
           Milliseconds timeout);
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

GlooMesh::GlooMesh(const Membership& membership, const std::string& address,
                   const std::string& name, Milliseconds timeout)
    : Mesh(membership.rank, membership.world_size) {
  const NoSigpipe guard;
  const ClosedOnExec closed;
  gloo::transport::tcp::attr attributes;
  attributes.hostname = address;
  device_ = gloo::transport::tcp::CreateDevice(attributes);
  context_ = std::make_shared<gloo::rendezvous::Context>(membership.rank, membership.world_size);
  context_->setTimeout(timeout / 5);  // Gloo waits five times as long for a connection
  GlooStore store(*membership.store, membership.prefix + name + "/", timeout);
  context_->connectFullMesh(store, device_);
}

/// Gloo's ports take whoever comes first. Where that was no rank of this job, somebody finds out,
/// and all ranks try again with new ports.
constexpr int kAttempts = 4;

/// To connect, and as long to answer. Each attempt has twice the time of the one before: who says
/// nothing at a port costs little, and late or slow ranks have most of the collective's timeout,
/// within which all attempts stay.
Milliseconds limit_of(int attempt, Milliseconds timeout) {
  constexpr int kParts = 2 * ((1 << kAttempts) - 1) + 4;  // 4: to tell each other how it went
  return timeout * (1 << attempt) / kParts;
}

std::unique_ptr<Mesh> connect_within(Milliseconds timeout, const Membership& membership,
                                     const std::string& address, const std::string& name,
                                     std::string& error) {
  try {
    auto mesh = std::make_unique<GlooMesh>(membership, address, name, timeout);
    if (!membership.token.empty()) authenticate(*mesh, membership.token, timeout);
    return mesh;
  } catch (const GroupBroken&) {
    throw;
  } catch (const std::exception& caught) {
    error = core::str("rank ", membership.rank, ": ", caught.what());
    return nullptr;
  }
}

}  // namespace

std::unique_ptr<Mesh> connect_gloo(const Membership& membership) {
  const std::string address = own_address(membership);
  std::string error;
  for (int i = 0; i < kAttempts; ++i) {
    const std::string name = core::str("gloo", i);
    std::string mine;
    auto mesh = connect_within(limit_of(i, membership.timeout), membership, address, name, mine);
    const auto errors = share(membership, name, mine);
    const auto found = std::find_if(errors.begin(), errors.end(),
                                    [](const std::string& text) { return !text.empty(); });
    if (found == errors.end()) return mesh;
    error = *found;
    log::debug("connecting Gloo, attempt {}: {}", i + 1, error);
  }
  core::fail<core::CommunicationError>("gloo", "the ranks could not connect in ", kAttempts,
                                       " attempts; does somebody else connect to their ports? ",
                                       error);
}

std::string gloo_version() {
  return core::str(GLOO_VERSION_MAJOR, ".", GLOO_VERSION_MINOR, ".", GLOO_VERSION_PATCH);
}

}  // namespace cairn::parallel
