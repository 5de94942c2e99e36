// A mesh: every rank can send bytes to every other. The CPU's collectives are written on it once,
// for processes and for threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace cairn::parallel {

class Mesh {
 public:
  /// Collectives wait without a limit of their own: who judges the job ends them, by abort().
  static constexpr std::chrono::milliseconds kForever = std::chrono::hours(24);

  struct Send {
    int to = 0;
    const void* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Receive {
    int from = 0;
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  Mesh(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Mesh() = default;
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Messages meet only where both sides have set the same tag.
  void set_tag(std::uint64_t tag) { tag_ = tag; }
  /// Messages on their way. Its end, waited for or not, ends the use of their memory on this side.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    /// Returns when all is sent and received. Throws CommunicationError where a peer is gone, after
    /// abort() and where the time is over: a mesh is of no use then.
    virtual void wait(std::chrono::milliseconds timeout) = 0;
    void wait() { wait(kForever); }
    /// Returns when all is received: whether all is sent too. If not, wait() is still to come.
    virtual bool wait_received() {
      wait();
      return true;
    }
  };
  /// Starts to send and receive. At most one of each with every peer, none of zero bytes. Peers
  /// start the matching counterparts with the same `round`; rounds of one collective differ.
  virtual std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                          const std::vector<Receive>& receives) = 0;
  void exchange(const std::vector<Send>& sends, const std::vector<Receive>& receives) {
    start(0, sends, receives)->wait();
  }
  virtual void abort() noexcept = 0;
  /// How much of a tensor is reduced at a time; the same on all ranks.
  virtual std::size_t segment_bytes() const { return 4 << 20; }

 protected:
  std::uint64_t tag(int round) const {
    return tag_ + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(round);
  }

 private:
  int rank_;
  int size_;
  std::uint64_t tag_ = 0;
};

}  // namespace cairn::parallel
