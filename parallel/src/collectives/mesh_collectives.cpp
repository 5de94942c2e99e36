// The CPU's collectives.
//
// all_reduce: x is cut into one part a rank; each rank receives its part from all others, combines
// them in rank order (so the bits do not depend on sizes or timing) and sends the result to all
// others. Every rank sends and receives 2 (world_size - 1) / world_size of x, the least possible,
// in x's dtype. Large x is cut into segments: while one is combined, the next one's parts and the
// last one's results are on their way. Small x goes whole to everybody in one round instead, with
// the same bits. broadcast: a binomial tree.
#include <algorithm>
#include <cstring>

#include "cairn/core/memory.h"
#include "collectives/combine.h"
#include "collectives/mesh.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kSmallBytes = 16 << 10;   // sent whole to everybody
constexpr std::size_t kSegmentBytes = 4 << 20;  // of x
constexpr std::size_t kPartAlignment = 64;      // elements

class MeshCollectives : public Collectives {
 public:
  explicit MeshCollectives(std::unique_ptr<Mesh> mesh) : mesh_(std::move(mesh)) {}
  void begin(std::uint64_t fingerprint, const std::string& /*what*/) override {
    mesh_->set_tag(fingerprint);
  }
  void all_reduce(const TensorView& x, ReduceOp op) override;
  void broadcast(const TensorView& x, int root) override;
  void all_gather(const TensorView& x, const TensorView& y) override;
  void reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op) override;
  void abort() noexcept override { mesh_->abort(); }

 private:
  struct Segment {
    std::byte* data = nullptr;
    std::size_t count = 0;  // elements
    std::size_t item = 0;   // bytes
    std::size_t part = 0;   // elements a rank combines; the last ones get fewer
    int index = 0;

    std::size_t begin(int rank) const {
      return std::min(count, part * static_cast<std::size_t>(rank));
    }
    std::size_t bytes(int rank) const { return (begin(rank + 1) - begin(rank)) * item; }
    std::byte* at(int rank) const { return data + begin(rank) * item; }
  };
  /// All ranks' blocks on their way to this one; blocks are there after transfer->wait().
  struct Gathering {
    std::unique_ptr<Mesh::Transfer> transfer;
    std::vector<const void*> blocks;  // in rank order
  };

  /// Calls f(peer) for every other rank, the next one first: so that not all ranks send to rank 0
  /// at the same time.
  template <class F>
  void for_each_peer(F&& f) const {
    for (int i = 1; i < mesh_->size(); ++i) f((mesh_->rank() + i) % mesh_->size());
  }
  std::byte* workspace(std::size_t bytes);
  /// Starts to receive one block from every peer into `space` while sending them theirs; our own
  /// block is `own`.
  Gathering gather_blocks(int round, const std::vector<Mesh::Send>& sends, const std::byte* own,
                          std::size_t bytes, std::byte* space);
  void all_reduce_small(const TensorView& x, ReduceOp op);
  std::vector<Segment> segments_of(const TensorView& x) const;
  Gathering gather_parts(const Segment& segment);
  std::unique_ptr<Mesh::Transfer> spread_result(const Segment& segment);

  std::unique_ptr<Mesh> mesh_;
  std::shared_ptr<core::Storage> workspace_;
};

std::byte* MeshCollectives::workspace(std::size_t bytes) {
  if (!workspace_ || workspace_->bytes() < bytes) {
    workspace_.reset();
    const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
    workspace_ = core::Storage::allocate(bytes, Device{});
  }
  return static_cast<std::byte*>(workspace_->data());
}

MeshCollectives::Gathering MeshCollectives::gather_blocks(int round,
                                                          const std::vector<Mesh::Send>& sends,
                                                          const std::byte* own, std::size_t bytes,
                                                          std::byte* space) {
  Gathering gathering;
  gathering.blocks.assign(static_cast<std::size_t>(mesh_->size()), own);
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    std::byte* block = space + bytes * static_cast<std::size_t>(peer);
    gathering.blocks[static_cast<std::size_t>(peer)] = block;
    if (bytes > 0) receives.push_back({peer, block, bytes});
  });
  gathering.transfer = mesh_->start(round, sends, receives);
  return gathering;
}

void MeshCollectives::all_reduce_small(const TensorView& x, ReduceOp op) {
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) { sends.push_back({peer, x.data, x.nbytes()}); });
  std::byte* space = workspace(x.nbytes() * static_cast<std::size_t>(mesh_->size()));
  const Gathering all = gather_blocks(0, sends, static_cast<std::byte*>(x.data), x.nbytes(), space);
  all.transfer->wait();
  combine(op, x.dtype, all.blocks, x.data, static_cast<std::size_t>(x.numel()));
}

std::vector<MeshCollectives::Segment> MeshCollectives::segments_of(const TensorView& x) const {
  const std::size_t item = core::size_of(x.dtype);
  const auto size = static_cast<std::size_t>(mesh_->size());
  const auto count = static_cast<std::size_t>(x.numel());
  const std::size_t most = kSegmentBytes / item;
  std::vector<Segment> segments;
  for (std::size_t at = 0; at < count; at += most) {
    const std::size_t n = std::min(most, count - at);
    const std::size_t part =
        ((n + size - 1) / size + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    segments.push_back({static_cast<std::byte*>(x.data) + at * item, n, item, part,
                        static_cast<int>(segments.size())});
  }
  return segments;
}

/// Segments use two halves of the workspace by turns.
MeshCollectives::Gathering MeshCollectives::gather_parts(const Segment& segment) {
  const std::size_t half =
      (kSegmentBytes + kPartAlignment * segment.item * static_cast<std::size_t>(mesh_->size()));
  std::byte* space = workspace(2 * half) + (segment.index % 2 == 0 ? 0 : half);
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) {
    if (segment.bytes(peer) > 0) sends.push_back({peer, segment.at(peer), segment.bytes(peer)});
  });
  const int rank = mesh_->rank();
  return gather_blocks(2 * segment.index, sends, segment.at(rank), segment.bytes(rank), space);
}

std::unique_ptr<Mesh::Transfer> MeshCollectives::spread_result(const Segment& segment) {
  const int rank = mesh_->rank();
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    if (segment.bytes(rank) > 0) sends.push_back({peer, segment.at(rank), segment.bytes(rank)});
    if (segment.bytes(peer) > 0) receives.push_back({peer, segment.at(peer), segment.bytes(peer)});
  });
  return mesh_->start(2 * segment.index + 1, sends, receives);
}

void MeshCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  if (x.nbytes() == 0) return;
  if (x.nbytes() <= kSmallBytes) return all_reduce_small(x, op);
  const int rank = mesh_->rank();
  const std::vector<Segment> segments = segments_of(x);
  std::unique_ptr<Mesh::Transfer> spreading;
  Gathering next = gather_parts(segments.front());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const Gathering parts = std::move(next);  // NOLINT(bugprone-use-after-move): set anew below
    parts.transfer->wait();
    if (i + 1 < segments.size()) next = gather_parts(segments[i + 1]);
    combine(op, x.dtype, parts.blocks, segment.at(rank), segment.bytes(rank) / segment.item);
    if (spreading) spreading->wait();
    spreading = spread_result(segment);
  }
  spreading->wait();
}

void MeshCollectives::broadcast(const TensorView& x, int root) {
  if (x.nbytes() == 0) return;
  const int size = mesh_->size();
  const int place = (mesh_->rank() - root + size) % size;
  const auto rank_at = [&](int p) { return (p + root) % size; };
  int bit = 1;
  while (bit < size && (place & bit) == 0) bit <<= 1;
  if (place != 0) mesh_->exchange({}, {{rank_at(place - bit), x.data, x.nbytes()}});
  std::vector<Mesh::Send> sends;
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (place + bit < size) sends.push_back({rank_at(place + bit), x.data, x.nbytes()});
  }
  if (!sends.empty()) mesh_->exchange(sends, {});
}

void MeshCollectives::all_gather(const TensorView& x, const TensorView& y) {
  if (x.nbytes() == 0) return;
  auto* out = static_cast<std::byte*>(y.data);
  const auto block = [&](int rank) { return out + x.nbytes() * static_cast<std::size_t>(rank); };
  std::memmove(block(mesh_->rank()), x.data, x.nbytes());
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    sends.push_back({peer, block(mesh_->rank()), x.nbytes()});
    receives.push_back({peer, block(peer), x.nbytes()});
  });
  mesh_->exchange(sends, receives);
}

void MeshCollectives::reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op) {
  if (y.nbytes() == 0) return;
  const auto* in = static_cast<const std::byte*>(x.data);
  const auto part = [&](int rank) { return in + y.nbytes() * static_cast<std::size_t>(rank); };
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) { sends.push_back({peer, part(peer), y.nbytes()}); });
  std::byte* space = workspace(y.nbytes() * static_cast<std::size_t>(mesh_->size()));
  const Gathering all = gather_blocks(0, sends, part(mesh_->rank()), y.nbytes(), space);
  all.transfer->wait();
  combine(op, y.dtype, all.blocks, y.data, static_cast<std::size_t>(y.numel()));
}

}  // namespace

std::unique_ptr<Collectives> make_mesh_collectives(std::unique_ptr<Mesh> mesh) {
  return std::make_unique<MeshCollectives>(std::move(mesh));
}

}  // namespace cairn::parallel
