// A mesh of processes of one host: messages pass through rings in shared memory.
//
// A message is a header (tag, bytes) and its data, in pieces as the ring has room. Both sides start
// the messages of a pair in the same order. Whoever waits moves all messages of this rank, also those
// of other transfers; start() moves what fits at once.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "collectives/mesh.h"
#include "collectives/shm/segment.h"

namespace cairn::parallel {

class ShmMesh : public Mesh {
 public:
  /// rank is this process's place in the segment.
  ShmMesh(std::shared_ptr<ShmSegment> segment, int rank);
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override;
  void abort() noexcept override;
  /// What a core's cache holds: memory is read from far away once.
  std::size_t segment_bytes() const override { return 256 << 10; }

 private:
  class ShmTransfer;
  struct Message {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t tag = 0;
    std::size_t done = 0;  // bytes, those of the header included
    ShmTransfer* transfer = nullptr;
  };
  /// What is under way with one peer, and this side's own positions: the segment's may be wrong.
  struct Peer {
    std::deque<Message> sends, receives;
    std::uint64_t written = 0, read = 0;
  };
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  bool progress();
  bool push(int to);
  bool pull(int from);
  std::size_t push_some(Message& message, int to, std::size_t room);
  std::size_t pull_some(Message& message, int from, std::size_t there);
  void check_header(const Message& message, int from, const std::byte* header) const;
  void wait_for(const ShmTransfer& transfer, std::chrono::milliseconds timeout);
  void forget(ShmTransfer& transfer);
  void throw_if_ended() const;

  std::shared_ptr<ShmSegment> segment_;
  std::vector<Peer> peers_;
  std::vector<std::byte> headers_;  // the part of a header that has come, by peer
  bool yields_ = false;             // more ranks than cores: spinning takes them from who works
  bool torn_ = false;               // a message was given up half way
  std::atomic<bool> aborted_ = false;
};

}  // namespace cairn::parallel
