// Sending between threads of one process: a mailbox for each rank, in which senders leave the
// address of what they send; who receives it copies it from there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "transports/mesh.h"

namespace cairn::parallel {

class Mailboxes {
 public:
  explicit Mailboxes(int ranks) : boxes_(static_cast<std::size_t>(ranks)) {}
  /// Ends all waits, with GroupBroken for this reason, and every later one.
  void break_all(const std::string& reason);

 private:
  friend class InProcessTransfer;
  /// What a transfer has sent and nobody has taken yet; guarded by the sender's box.
  struct Outgoing {
    int left = 0;
  };
  struct Post {
    const void* data = nullptr;
    std::size_t bytes = 0;
    std::shared_ptr<Outgoing> outgoing;
  };
  using Key = std::pair<int, std::uint64_t>;  // sender, tag
  struct Box {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<Key, Post> posts;
  };

  Box& of(int rank) { return boxes_[static_cast<std::size_t>(rank)]; }
  template <class Come>
  void wait(Box& box, std::unique_lock<std::mutex>& lock, Clock::time_point deadline, Come come);

  std::vector<Box> boxes_;
  std::atomic<bool> broken_ = false;
  std::string reason_;  // written before broken_
};

/// Ranks `ranks[0], ranks[1], ...` of the mailboxes as a mesh, of which this is number `place`.
/// `salt` keeps meshes of the same ranks apart.
std::unique_ptr<Mesh> make_in_process_mesh(std::shared_ptr<Mailboxes> boxes, std::vector<int> ranks,
                                           int place, std::uint64_t salt);

}  // namespace cairn::parallel
