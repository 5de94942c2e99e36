#include "collectives/shm/shm_mesh.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using Clock = std::chrono::steady_clock;

struct MessageHeader {
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
};
constexpr std::size_t kHeader = sizeof(MessageHeader);
// What is copied before the other side hears of it: it stays in a core's cache, and the other side
// copies it on meanwhile.
constexpr std::size_t kChunk = 64 << 10;
constexpr auto kSpin = std::chrono::microseconds(50);

int cores_of_this_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

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

}  // namespace

class ShmMesh::ShmTransfer : public Mesh::Transfer {
 public:
  explicit ShmTransfer(ShmMesh& mesh) : mesh_(mesh) {}
  ~ShmTransfer() override {
    if (open > 0) mesh_.forget(*this);
  }
  void wait(std::chrono::milliseconds timeout) override { mesh_.wait_for(*this, timeout); }

  std::size_t open = 0;  // messages that are under way

 private:
  ShmMesh& mesh_;
};

ShmMesh::ShmMesh(std::shared_ptr<ShmSegment> segment, int rank)
    : Mesh(rank, segment->ranks()),
      segment_(std::move(segment)),
      peers_(static_cast<std::size_t>(size())),
      headers_(static_cast<std::size_t>(size()) * kHeader),
      yields_(cores_of_this_process() < size()) {}

void ShmMesh::throw_if_ended() const {
  if (aborted_ || torn_) core::fail<CommunicationError>("shm", "the collective was aborted");
}

std::unique_ptr<Mesh::Transfer> ShmMesh::start(int round, const std::vector<Send>& sends,
                                               const std::vector<Receive>& receives) {
  throw_if_ended();
  auto transfer = std::make_unique<ShmTransfer>(*this);
  for (const Send& send : sends) {
    auto* data = static_cast<std::byte*>(const_cast<void*>(send.data));
    peer(send.to).sends.push_back({data, send.bytes, tag(round), 0, transfer.get()});
    ++transfer->open;
  }
  for (const Receive& receive : receives) {
    auto* data = static_cast<std::byte*>(receive.data);
    peer(receive.from).receives.push_back({data, receive.bytes, tag(round), 0, transfer.get()});
    ++transfer->open;
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
  const auto belongs = [&](const Message& message) { return message.transfer == &transfer; };
  torn_ = true;
  for (Peer& p : peers_) {
    std::erase_if(p.sends, belongs);
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
  if (p.sends.empty()) return false;
  ShmSegment::Positions& positions = segment_->positions(rank(), to);
  bool moved = false;
  while (!p.sends.empty()) {
    const std::uint64_t used = p.written - positions.read.load(std::memory_order_acquire);
    if (used > segment_->ring_bytes())
      core::fail<CommunicationError>("shm", "rank ", to, " has damaged the shared memory");
    Message& message = p.sends.front();
    const std::size_t some = push_some(message, to, segment_->ring_bytes() - used);
    if (some == 0) break;
    p.written += some;
    positions.written.store(p.written, std::memory_order_release);
    segment_->wake(to);
    moved = true;
    if (message.done < kHeader + message.bytes) continue;
    --message.transfer->open;
    p.sends.pop_front();
  }
  return moved;
}

/// A header and the data behind it, or more data; 0 where there is no room.
std::size_t ShmMesh::push_some(Message& message, int to, std::size_t room) {
  Peer& p = peer(to);
  std::byte* ring = segment_->ring(rank(), to);
  std::size_t some = 0;
  if (message.done == 0) {
    if (room < kHeader) return 0;
    const MessageHeader header{message.tag, message.bytes};
    copy_in(ring, segment_->ring_bytes(), p.written, &header, kHeader);
    message.done = some = kHeader;
  }
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
    const std::uint64_t there = positions.written.load(std::memory_order_acquire) - p.read;
    if (there > segment_->ring_bytes())
      core::fail<CommunicationError>("shm", "rank ", from, " has damaged the shared memory");
    Message& message = p.receives.front();
    const std::size_t some = pull_some(message, from, there);
    if (some == 0) break;
    p.read += some;
    positions.read.store(p.read, std::memory_order_release);
    segment_->wake(from);
    moved = true;
    if (message.done < kHeader + message.bytes) continue;
    --message.transfer->open;
    p.receives.pop_front();
  }
  return moved;
}

/// What is there of a header and its data; 0 where nothing has come.
std::size_t ShmMesh::pull_some(Message& message, int from, std::size_t there) {
  Peer& p = peer(from);
  const std::byte* ring = segment_->ring(from, rank());
  std::byte* header = headers_.data() + static_cast<std::size_t>(from) * kHeader;
  std::size_t some = 0;
  if (message.done < kHeader) {
    some = std::min(there, kHeader - message.done);
    copy_out(ring, segment_->ring_bytes(), p.read, header + message.done, some);
    message.done += some;
    if (message.done < kHeader) return some;
    check_header(message, from, header);
  }
  const std::size_t got = message.done - kHeader;
  const std::size_t bytes = std::min({message.bytes - got, there - some, kChunk});
  copy_out(ring, segment_->ring_bytes(), p.read + some, message.data + got, bytes);
  message.done += bytes;
  return some + bytes;
}

void ShmMesh::check_header(const Message& message, int from, const std::byte* header) const {
  MessageHeader came;
  std::memcpy(&came, header, kHeader);
  if (came.tag == message.tag && came.bytes == message.bytes) return;
  core::fail<CommunicationError>("shm", "rank ", rank(), " expected ", message.bytes,
                                 " bytes from rank ", from, ", which sent ", came.bytes,
                                 came.tag == message.tag ? "" : " of another collective");
}

void ShmMesh::wait_for(const ShmTransfer& transfer, std::chrono::milliseconds timeout) {
  throw_if_ended();
  const auto deadline = Clock::now() + timeout;
  const auto moves = [&] { return aborted_ || progress(); };
  auto idle_since = Clock::now();
  bool idle = false;
  while (transfer.open > 0) {
    throw_if_ended();
    if (progress()) {
      idle = false;
      continue;
    }
    const auto now = Clock::now();
    if (!std::exchange(idle, true)) {
      idle_since = now;
      if (yields_) sched_yield();
      continue;
    }
    if (!yields_ && now - idle_since < kSpin) continue;
    if (!segment_->sleep(rank(), moves) && now >= deadline)
      core::fail<CommunicationError>("shm", "the other rank did not come in time");
  }
}

}  // namespace cairn::parallel
