// The CPU's collectives, written once over any Mesh. Cost: a rank's messages and bytes, n ranks.
//
// A part is what one rank of several has or gets. Contributions are combined in rank order, so the
// bits do not depend on sizes, timing or the algorithm.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cairn/core/memory.h"
#include "collectives/collectives.h"
#include "transports/mesh.h"

namespace cairn::parallel {

class MeshCollectives : public Collectives {
 public:
  explicit MeshCollectives(std::unique_ptr<Mesh> mesh);
  void begin(const CollectiveId& called) override { mesh_->set_tag(called.fingerprint); }
  void abort() noexcept override { mesh_->abort(); }

  // mesh_reductions.cpp
  void all_reduce(const TensorView& x, ReduceOp op) override;
  void reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) override;
  void reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                      ReduceOp op) override;
  // mesh_collectives.cpp
  void broadcast(const TensorView& x, int root) override;
  void all_gather(const TensorView& x, const TensorView& y, const Counts& counts) override;
  void gather(const TensorView& x, const TensorView& y, const Counts& counts, int root) override;
  void scatter(const TensorView& x, const TensorView& y, const Counts& counts, int root) override;
  void all_to_all(const TensorView& x, const Counts& send_counts, const TensorView& y,
                  const Counts& receive_counts, bool even) override;
  void barrier() override;
  void send(const TensorView& x, int to, std::uint64_t tag) override;
  void receive(const TensorView& x, int from, std::uint64_t tag) override;
  void send_header(const TensorView& x, int to, std::uint64_t tag) override;
  void receive_header(const TensorView& x, int from, std::uint64_t tag) override;

 private:
  /// A piece of memory and its parts, in rank order: part r is [begin[r], begin[r + 1]).
  struct Parts {
    std::byte* data = nullptr;
    std::vector<std::size_t> begin;  // bytes; world size + 1
    std::byte* at(int rank) const { return data + begin[static_cast<std::size_t>(rank)]; }
    std::size_t bytes(int rank) const {
      const auto r = static_cast<std::size_t>(rank);
      return begin[r + 1] - begin[r];
    }
    std::size_t total() const { return begin.back(); }
  };
  static Parts parts_of(const TensorView& whole, const Counts& counts);

  /// What is reduced at a time: each rank combines one piece, which may be empty.
  struct MessageChunk {
    int index = 0;
    std::vector<std::byte*> at;
    std::vector<std::size_t> bytes;
  };
  struct Reduction;
  /// All ranks' blocks on their way to this one; blocks are there after transfer->wait().
  struct Gathering {
    std::unique_ptr<Mesh::Transfer> transfer;
    std::vector<const void*> blocks;  // in rank order
  };

  int rank() const { return mesh_->rank(); }
  int size() const { return mesh_->size(); }
  /// Calls f(peer) for every other rank, the next one first: so that not all ranks send to rank 0
  /// at the same time.
  template <class F>
  void for_each_peer(F&& f) const {
    for (int i = 1; i < size(); ++i) f((rank() + i) % size());
  }
  std::byte* workspace(std::size_t bytes);
  Gathering start_gathering(int round, std::byte* own, std::size_t bytes, std::byte* space);
  std::vector<std::byte*> gather_in_log_rounds(const std::byte* own,
                                               const std::vector<std::size_t>& bytes,
                                               std::byte* space);
  bool is_small(std::size_t bytes) const;
  void reduce_small(const TensorView& x, void* out, ReduceOp op);
  void reduce_small_to_root(const TensorView& x, const TensorView& y, ReduceOp op, int root);
  std::vector<MessageChunk> segments_of(const TensorView& x) const;
  std::vector<MessageChunk> segments_of_parts(const Parts& parts, std::size_t item) const;
  void reduce_segments(const std::vector<MessageChunk>& segments, const Reduction& reduction);
  Gathering gather_segment(const MessageChunk& segment, const Reduction& reduction);
  void compare_counts(const Counts& send_counts, const Counts& receive_counts);
  void set_pair_tag(int from, int to, std::uint64_t number);
  void send_with_header(const TensorView& x, int to, std::uint64_t tag, std::size_t bytes);

  std::unique_ptr<Mesh> mesh_;
  std::shared_ptr<core::Storage> workspace_;
  // Of the messages that start next: they keep their memory.
  std::vector<Mesh::Send> sends_;
  std::vector<Mesh::Receive> receives_;
  // Messages so far, by peer.
  std::vector<std::uint64_t> sent_, received_;
};

std::unique_ptr<Collectives> make_mesh_collectives(std::unique_ptr<Mesh> mesh);

}  // namespace cairn::parallel
