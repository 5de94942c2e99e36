#include "transports/in_process/in_process_mesh.h"

#include <cstring>

#include "cairn/core/error.h"
#include "store/broken.h"

namespace cairn::parallel {

void Mailboxes::break_all(const std::string& reason) {
  reason_ = reason;
  broken_ = true;
  for (Box& box : boxes_) {
    const std::lock_guard lock(box.mutex);  // whoever looks at the box now waits before this
    box.changed.notify_all();
  }
}

/// Until `come`; throws where the group breaks before: what is there counts, whoever gave up since.
template <class Come>
void Mailboxes::wait(Box& box, std::unique_lock<std::mutex>& lock, Clock::time_point deadline,
                     Come come) {
  const auto over = [&] { return broken_ || come(); };
  if (deadline == Clock::time_point::max()) {
    box.changed.wait(lock, over);
  } else if (!box.changed.wait_until(lock, deadline, over)) {
    core::fail<core::CommunicationError>("group", "the other rank did not come in time");
  }
  if (!come()) throw GroupBroken("group", reason_);
}

class InProcessTransfer : public Mesh::Transfer {
 public:
  InProcessTransfer(Mailboxes& boxes, int rank, std::uint64_t tag, std::vector<Mesh::Send> sends,
                    std::vector<Mesh::Receive> receives)
      : boxes_(boxes),
        rank_(rank),
        tag_(tag),
        sends_(std::move(sends)),
        receives_(std::move(receives)) {
    outgoing_->left = static_cast<int>(sends_.size());
    for (const Mesh::Send& send : sends_) {
      auto& box = boxes_.of(send.to);
      const std::lock_guard lock(box.mutex);
      box.posts[{rank_, tag_}] = {send.data, send.bytes, outgoing_};
      box.changed.notify_all();
    }
  }
  /// What nobody took is withdrawn.
  ~InProcessTransfer() override {
    for (const Mesh::Send& send : sends_) {
      auto& box = boxes_.of(send.to);
      const std::lock_guard lock(box.mutex);
      const auto post = box.posts.find({rank_, tag_});
      if (post != box.posts.end() && post->second.outgoing == outgoing_) box.posts.erase(post);
    }
  }
  void wait(std::chrono::milliseconds timeout) override;

 private:
  void receive(const Mesh::Receive& receive, Clock::time_point deadline);

  Mailboxes& boxes_;
  int rank_;
  std::uint64_t tag_;
  std::vector<Mesh::Send> sends_;
  std::vector<Mesh::Receive> receives_;
  std::shared_ptr<Mailboxes::Outgoing> outgoing_ = std::make_shared<Mailboxes::Outgoing>();
};

void InProcessTransfer::receive(const Mesh::Receive& receive, Clock::time_point deadline) {
  std::shared_ptr<Mailboxes::Outgoing> outgoing;
  {
    auto& own = boxes_.of(rank_);
    std::unique_lock lock(own.mutex);
    const Mailboxes::Key key{receive.from, tag_};
    boxes_.wait(own, lock, deadline, [&] { return own.posts.contains(key); });
    const auto post = own.posts.find(key);
    if (post->second.bytes != receive.bytes) {
      core::fail<core::CommunicationError>("group", "rank ", rank_, " expected ", receive.bytes,
                                           " bytes from rank ", receive.from, ", which sent ",
                                           post->second.bytes);
    }
    // Copied under the lock, because the sender's memory lives only while it is posted.
    std::memcpy(receive.data, post->second.data, receive.bytes);
    outgoing = std::move(post->second.outgoing);
    own.posts.erase(post);
  }
  auto& senders = boxes_.of(receive.from);
  const std::lock_guard lock(senders.mutex);
  if (--outgoing->left == 0) senders.changed.notify_all();
}

void InProcessTransfer::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout < std::chrono::hours(24);
  const auto deadline = bounded ? Clock::now() + timeout : Clock::time_point::max();
  for (const Mesh::Receive& message : receives_) receive(message, deadline);
  auto& own = boxes_.of(rank_);
  std::unique_lock lock(own.mutex);
  boxes_.wait(own, lock, deadline, [&] { return outgoing_->left == 0; });
}

namespace {

class InProcessMesh : public Mesh {
 public:
  InProcessMesh(std::shared_ptr<Mailboxes> boxes, std::vector<int> ranks, int place,
                std::uint64_t salt)
      : Mesh(place, static_cast<int>(ranks.size())),
        boxes_(std::move(boxes)),
        ranks_(std::move(ranks)),
        salt_(salt) {}
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    std::vector<Send> out = sends;
    std::vector<Receive> in = receives;
    for (Send& send : out) send.to = number(send.to);
    for (Receive& receive : in) receive.from = number(receive.from);
    return std::make_unique<InProcessTransfer>(*boxes_, number(rank()), tag(round) ^ salt_,
                                               std::move(out), std::move(in));
  }
  void abort() noexcept override {}  // the mailboxes are told once for all

 private:
  int number(int place) const { return ranks_[static_cast<std::size_t>(place)]; }

  std::shared_ptr<Mailboxes> boxes_;
  std::vector<int> ranks_;
  std::uint64_t salt_;
};

}  // namespace

std::unique_ptr<Mesh> make_in_process_mesh(std::shared_ptr<Mailboxes> boxes, std::vector<int> ranks,
                                           int place, std::uint64_t salt) {
  return std::make_unique<InProcessMesh>(std::move(boxes), std::move(ranks), place, salt);
}

}  // namespace cairn::parallel
