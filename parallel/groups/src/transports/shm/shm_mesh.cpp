#include "transports/shm/shm_mesh.h"

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using Clock = std::chrono::steady_clock;

struct MessageHeader {
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // of the data in the sender's memory; 0: it follows
};
constexpr std::size_t kHeader = sizeof(MessageHeader);
// What is copied before the other side hears of it: it stays in a core's cache, and the other side
// copies it on meanwhile.
constexpr std::size_t kChunk = 64 << 10;
// What a transfer sends altogether from which on it is offered: less stays in the cores' caches,
// where a copy costs less than a system call and the pages that it has to find.
constexpr std::size_t kLeastOffered = 768 << 10;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kLooksBeforeClock = 32;  // a rank that comes at the same time is there by then

void copy_in(std::byte* ring, std::size_t size, std::uint64_t at, const void* data,
             std::size_t bytes) {
  const std::size_t begin = at % size, first = std::min(bytes, size - begin);
  std::memcpy(ring + begin, data, first);
  if (bytes > first) std::memcpy(ring, static_cast<const std::byte*>(data) + first, bytes - first);
}

void copy_out(const std::byte* ring, std::size_t size, std::uint64_t at, void* data,
              std::size_t bytes) {
  const std::size_t begin = at % size, first = std::min(bytes, size - begin);
  std::memcpy(data, ring + begin, first);
  if (bytes > first) std::memcpy(static_cast<std::byte*>(data) + first, ring, bytes - first);
}

/// What of another process's memory could be read.
std::size_t read_process(pid_t pid, std::uint64_t address, void* data, std::size_t bytes) {
  std::size_t done = 0;
  while (done < bytes) {
    const iovec here{static_cast<std::byte*>(data) + done, bytes - done};
    const iovec there{reinterpret_cast<void*>(address + done), bytes - done};
    const ssize_t some = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (some <= 0) break;
    done += static_cast<std::size_t>(some);
  }
  return done;
}

}  // namespace

class ShmMesh::ShmTransfer : public Mesh::Transfer {
 public:
  explicit ShmTransfer(ShmMesh& mesh) : mesh_(mesh) {}
  ~ShmTransfer() override {
    if (open > 0) mesh_.forget(*this);
  }
  void wait(std::chrono::milliseconds timeout) override { mesh_.wait_for(open, timeout); }
  bool wait_received() override {
    mesh_.wait_for(receiving, kForever);
    return open == 0;
  }

  // Messages that are under way.
  std::size_t open = 0, receiving = 0;

 private:
  ShmMesh& mesh_;
};

ShmMesh::ShmMesh(std::shared_ptr<ShmSegment> segment, int rank)
    : Mesh(rank, segment->ranks()),
      segment_(std::move(segment)),
      peers_(static_cast<std::size_t>(size())),
      nonce_(segment_->nonce()) {
  ShmSegment::Owner& mine = segment_->owner(rank);
  mine.nonce_at = reinterpret_cast<std::uint64_t>(&nonce_);
  mine.pid = getpid();
}

void ShmMesh::throw_if_ended() const {
  if (aborted_ || torn_) core::fail<CommunicationError>("shm", "the collective was aborted");
}

std::unique_ptr<Mesh::Transfer> ShmMesh::start(int round, const std::vector<Send>& sends,
                                               const std::vector<Receive>& receives) {
  throw_if_ended();
  auto transfer = std::make_unique<ShmTransfer>(*this);
  std::size_t bytes = 0;
  for (const Send& send : sends) bytes += send.bytes;
  const bool offers = !receives.empty() && bytes >= kLeastOffered;
  for (const Send& send : sends) {
    auto* data = static_cast<std::byte*>(const_cast<void*>(send.data));
    const bool offered = offers && segment_->positions(rank(), send.to).reads_memory == 1;
    peer(send.to).sends.push_back({data, send.bytes, tag(round), 0, transfer.get(), offered});
    ++transfer->open;
  }
  for (const Receive& receive : receives) {
    auto* data = static_cast<std::byte*>(receive.data);
    peer(receive.from).receives.push_back({data, receive.bytes, tag(round), 0, transfer.get()});
    ++transfer->open, ++transfer->receiving;
  }
  for (const Send& send : sends) push(send.to);
  return transfer;
}

void ShmMesh::abort() noexcept {
  aborted_ = true;
  ShmSegment::Bell& mine = segment_->bell(rank());
  mine.asleep.store(1);
  segment_->wake(rank());
}

/// Leaves no message that points to a transfer that is gone. What is half sent cannot be completed.
void ShmMesh::forget(ShmTransfer& transfer) {
  const auto belongs = [&](const ShmMessage& message) { return message.transfer == &transfer; };
  torn_ = true;
  segment_->owner(rank()).gave_up = 1;  // before anybody writes to what was offered
  for (Peer& p : peers_) {
    std::erase_if(p.sends, belongs);
    std::erase_if(p.offers, belongs);
    std::erase_if(p.receives, belongs);
  }
}

bool ShmMesh::progress() {
  bool moved = false;
  for (int i = 1; i < size(); ++i) {
    const int other = (rank() + i) % size();
    moved = pull(other) || moved;
    moved = push(other) || moved;
  }
  return moved;
}

bool ShmMesh::push(int to) {
  Peer& p = peer(to);
  if (p.sends.empty() && p.offers.empty()) return false;
  ShmSegment::Positions& positions = segment_->positions(rank(), to);
  bool moved = !p.offers.empty() && end_offers(p, positions.read.load());
  while (!p.sends.empty()) {
    ShmMessage& message = p.sends.front();
    const std::size_t some = push_some(message, to, room_for(message, to));
    if (some == 0) break;
    p.written += some;
    positions.written.store(p.written);
    segment_->wake(to);
    moved = true;
    if (message.offered) {
      message.end = p.written;
      p.offers.push_back(message);
    } else {
      if (message.done < kHeader + message.bytes) continue;
      --message.transfer->open;
    }
    p.sends.pop_front();
  }
  return moved;
}

/// In the ring. The reader's position lies in its core's cache: it is looked at where the room that
/// was seen last is not enough.
std::size_t ShmMesh::room_for(const ShmMessage& message, int to) {
  Peer& p = peer(to);
  const auto room = [&] { return segment_->ring_bytes() - (p.written - p.seen_read); };
  if (room() >= kHeader + message.bytes - message.done) return room();
  p.seen_read = segment_->positions(rank(), to).read.load();
  if (p.written - p.seen_read > segment_->ring_bytes())
    core::fail<CommunicationError>("shm", "rank ", to, " has damaged the shared memory");
  return room();
}

/// Those whose header is behind the reader's position have been read.
bool ShmMesh::end_offers(Peer& p, std::uint64_t read) {
  bool moved = false;
  while (!p.offers.empty() && p.offers.front().end <= read) {
    --p.offers.front().transfer->open;
    p.offers.pop_front();
    moved = true;
  }
  return moved;
}

/// A header and the data behind it, or more data; 0 where there is no room.
std::size_t ShmMesh::push_some(ShmMessage& message, int to, std::size_t room) {
  Peer& p = peer(to);
  std::byte* ring = segment_->ring(rank(), to);
  std::size_t some = 0;
  if (message.done == 0) {
    if (room < kHeader) return 0;
    const auto address = reinterpret_cast<std::uint64_t>(message.data);
    const MessageHeader header{message.tag, message.bytes, message.offered ? address : 0};
    copy_in(ring, segment_->ring_bytes(), p.written, &header, kHeader);
    message.done = some = kHeader;
  }
  if (message.offered) return some;
  const std::size_t sent = message.done - kHeader;
  const std::size_t bytes = std::min({message.bytes - sent, room - some, kChunk});
  copy_in(ring, segment_->ring_bytes(), p.written + some, message.data + sent, bytes);
  message.done += bytes;
  return some + bytes;
}

bool ShmMesh::pull(int from) {
  Peer& p = peer(from);
  if (p.receives.empty()) return false;
  ShmSegment::Positions& positions = segment_->positions(from, rank());
  bool moved = false;
  while (!p.receives.empty()) {
    const std::uint64_t there = positions.written.load() - p.read;
    if (there > segment_->ring_bytes())
      core::fail<CommunicationError>("shm", "rank ", from, " has damaged the shared memory");
    ShmMessage& message = p.receives.front();
    const std::size_t some = pull_some(message, from, there);
    if (some == 0) break;
    p.read += some;
    positions.read.store(p.read);
    segment_->wake(from);
    moved = true;
    if (message.done < kHeader + message.bytes) continue;
    --message.transfer->open, --message.transfer->receiving;
    p.receives.pop_front();
  }
  return moved;
}

/// What is there of a header and its data; 0 where nothing has come. A header comes as a whole.
std::size_t ShmMesh::pull_some(ShmMessage& message, int from, std::size_t there) {
  Peer& p = peer(from);
  std::size_t some = 0;
  if (message.done == 0) {
    if (there < kHeader) return 0;
    const std::uint64_t address = pull_header(message, from);
    message.done = some = kHeader;
    if (address != 0) {
      read_memory(message, from, address);
      message.done += message.bytes;
      return some;
    }
  }
  const std::byte* ring = segment_->ring(from, rank());
  const std::size_t got = message.done - kHeader;
  const std::size_t bytes = std::min({message.bytes - got, there - some, kChunk});
  copy_out(ring, segment_->ring_bytes(), p.read + some, message.data + got, bytes);
  message.done += bytes;
  return some + bytes;
}

/// The address.
std::uint64_t ShmMesh::pull_header(const ShmMessage& message, int from) {
  MessageHeader came;
  copy_out(segment_->ring(from, rank()), segment_->ring_bytes(), peer(from).read, &came, kHeader);
  if (came.tag != message.tag || came.bytes != message.bytes) {
    core::fail<CommunicationError>("shm", "rank ", rank(), " expected ", message.bytes,
                                   " bytes from rank ", from, ", which sent ", came.bytes,
                                   came.tag == message.tag ? "" : " of another collective");
  }
  if (!std::exchange(peer(from).probed, true)) probe(from);
  return came.address;
}

/// Tells the peer whether this rank can read its memory.
void ShmMesh::probe(int from) {
  const ShmSegment::Owner& theirs = segment_->owner(from);
  std::uint64_t nonce = 0;
  const bool read = read_process(theirs.pid, theirs.nonce_at, &nonce, sizeof nonce) == sizeof nonce;
  segment_->positions(from, rank()).reads_memory = read && nonce == nonce_ ? 1 : 0;
}

void ShmMesh::read_memory(const ShmMessage& message, int from, std::uint64_t address) const {
  const ShmSegment::Owner& theirs = segment_->owner(from);
  const std::size_t done = read_process(theirs.pid, address, message.data, message.bytes);
  if (theirs.gave_up != 0)
    core::fail<CommunicationError>("shm", "rank ", from, " has given up the collective");
  if (done < message.bytes)
    core::fail<CommunicationError>("shm", "cannot read the memory of rank ", from, ": ",
                                   std::strerror(errno));
}

/// Whether a rank that this one may wait for last waited where this one does.
bool ShmMesh::shares_core() {
  std::atomic<std::int32_t>& mine = segment_->owner(rank()).core;
  const std::int32_t core = sched_getcpu() + 1;
  if (mine.load(std::memory_order_relaxed) != core) mine = core;
  for (int other = 0; other < size(); ++other) {
    if (other != rank() && segment_->owner(other).core == core) return true;
  }
  return false;
}

/// Until none of them is left.
void ShmMesh::wait_for(const std::size_t& messages, std::chrono::milliseconds timeout) {
  throw_if_ended();
  const auto moves = [&] { return aborted_ || progress(); };
  std::optional<Clock::time_point> deadline, idle_since;  // most waits need no clock
  bool shared = false;
  int looks = 0;
  while (messages > 0) {
    throw_if_ended();
    if (progress()) {
      idle_since.reset();
      continue;
    }
    if (looks < kLooksBeforeClock) {
      ++looks;
      continue;
    }
    const auto now = Clock::now();
    if (!deadline) deadline = now + timeout;
    if (!idle_since) {
      idle_since = now;
      shared = shares_core();
      if (shared) sched_yield();
      continue;
    }
    if (!shared && now - *idle_since < kSpin) continue;
    if (!segment_->sleep(rank(), moves) && now >= *deadline)
      core::fail<CommunicationError>("shm", "the other rank did not come in time");
  }
}

}  // namespace cairn::parallel
