// A mesh of processes of one host: messages pass through rings in shared memory.
//
// A message is a header (tag, bytes, address) and its data, in pieces as the ring has room. Both
// sides start the messages of a pair in the same order. Whoever waits moves all messages of this
// rank, also those of other transfers; start() moves what fits at once.
//
// A large message of a transfer that also receives is offered: the ring carries its header alone,
// and the receiver reads the sender's memory (process_vm_readv), one copy instead of two. It has
// been read when the receiver's position is behind the header. Where the system forbids that, which
// each pair finds out with its first message, data goes through the ring. A transfer that only
// sends is never offered: its end does not wait for the reader then.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "transports/mesh.h"
#include "transports/shm/segment.h"

namespace cairn::parallel {

class ShmMesh : public Mesh {
 public:
  /// rank is this process's place in the segment.
  ShmMesh(std::shared_ptr<ShmSegment> segment, int rank);
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override;
  void abort() noexcept override;
  /// Few, so that ranks seldom wait for each other: where other programs want the cores too, each
  /// wait costs a time slice.
  std::size_t segment_bytes() const override { return 8 << 20; }

 private:
  class ShmTransfer;
  struct ShmMessage {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t tag = 0;
    std::size_t done = 0;  // bytes, those of the header included
    ShmTransfer* transfer = nullptr;
    bool offered = false;
    std::uint64_t end = 0;  // of an offered one's header, in the ring
  };
  /// What is under way with one peer, and this side's own positions: the segment's may be wrong.
  struct Peer {
    std::deque<ShmMessage> sends, receives;
    std::deque<ShmMessage> offers;  // whose header is written and not yet read
    std::uint64_t written = 0, read = 0;
    std::uint64_t seen_read = 0;  // the peer's position when this side last looked
    bool probed = false;          // whether this rank can read the peer's memory
  };
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  bool progress();
  bool push(int to);
  bool pull(int from);
  std::size_t push_some(ShmMessage& message, int to, std::size_t room);
  std::size_t pull_some(ShmMessage& message, int from, std::size_t there);
  std::uint64_t pull_header(const ShmMessage& message, int from);
  std::size_t room_for(const ShmMessage& message, int to);
  bool end_offers(Peer& p, std::uint64_t read);
  void probe(int from);
  void read_memory(const ShmMessage& message, int from, std::uint64_t address) const;
  bool shares_core();
  void wait_for(const std::size_t& messages, std::chrono::milliseconds timeout);
  void forget(ShmTransfer& transfer);
  void throw_if_ended() const;

  std::shared_ptr<ShmSegment> segment_;
  std::vector<Peer> peers_;
  const std::uint64_t nonce_;  // for others to find here
  bool torn_ = false;          // a message was given up half way
  std::atomic<bool> aborted_ = false;
};

}  // namespace cairn::parallel
