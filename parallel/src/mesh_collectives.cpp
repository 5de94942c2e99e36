// The CPU's collectives.
//
// all_reduce: x is cut into one part a rank; each rank receives its part from all others, combines
// them in rank order (so the bits do not depend on sizes or timing) and sends the result to all
// others. Every rank sends and receives 2 (world_size - 1) / world_size of x, the least possible,
// in x's dtype. Small x goes whole to everybody in one round instead, with the same bits.
// broadcast: a binomial tree.
#include <algorithm>
#include <cstring>

#include "cairn/core/memory.h"
#include "combine.h"
#include "mesh.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kSmallBytes = 16 << 10;   // sent whole to everybody
constexpr std::size_t kSegmentBytes = 8 << 20;  // of x at a time: bounds the workspace
constexpr std::size_t kPartAlignment = 64;      // elements

class MeshCollectives : public Collectives {
 public:
  explicit MeshCollectives(std::unique_ptr<Mesh> mesh) : mesh_(std::move(mesh)) {}
  void begin(std::uint64_t fingerprint) override { mesh_->set_tag(fingerprint); }
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

    std::size_t begin(int rank) const {
      return std::min(count, part * static_cast<std::size_t>(rank));
    }
    std::size_t bytes(int rank) const { return (begin(rank + 1) - begin(rank)) * item; }
    std::byte* at(int rank) const { return data + begin(rank) * item; }
  };

  /// Calls f(peer) for every other rank, the next one first: so that not all ranks send to rank 0
  /// at the same time.
  template <class F>
  void for_each_peer(F&& f) const {
    for (int i = 1; i < mesh_->size(); ++i) f((mesh_->rank() + i) % mesh_->size());
  }
  /// One block of `bytes` a rank.
  std::byte* workspace(std::size_t bytes);
  /// Receives one block from every peer while sending them theirs; pointers to all ranks' blocks,
  /// ours being `own`.
  std::vector<const void*> gather_blocks(const std::vector<Mesh::Send>& sends, const std::byte* own,
                                         std::size_t bytes);
  void all_reduce_small(const TensorView& x, ReduceOp op);
  void all_reduce_segment(const Segment& segment, DType dtype, ReduceOp op);

  std::unique_ptr<Mesh> mesh_;
  std::shared_ptr<core::Storage> workspace_;
};

std::byte* MeshCollectives::workspace(std::size_t bytes) {
  const std::size_t needed = bytes * static_cast<std::size_t>(mesh_->size());
  if (!workspace_ || workspace_->bytes() < needed) {
    workspace_.reset();
    const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
    workspace_ = core::Storage::allocate(needed, Device{});
  }
  return static_cast<std::byte*>(workspace_->data());
}

std::vector<const void*> MeshCollectives::gather_blocks(const std::vector<Mesh::Send>& sends,
                                                        const std::byte* own, std::size_t bytes) {
  std::byte* blocks = workspace(bytes);
  std::vector<const void*> pointers(static_cast<std::size_t>(mesh_->size()), own);
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    std::byte* block = blocks + bytes * static_cast<std::size_t>(peer);
    pointers[static_cast<std::size_t>(peer)] = block;
    if (bytes > 0) receives.push_back({peer, block, bytes});
  });
  mesh_->exchange(sends, receives);
  return pointers;
}

void MeshCollectives::all_reduce_small(const TensorView& x, ReduceOp op) {
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) { sends.push_back({peer, x.data, x.nbytes()}); });
  const auto inputs = gather_blocks(sends, static_cast<std::byte*>(x.data), x.nbytes());
  combine(op, x.dtype, inputs, x.data, static_cast<std::size_t>(x.numel()));
}

void MeshCollectives::all_reduce_segment(const Segment& segment, DType dtype, ReduceOp op) {
  const int rank = mesh_->rank();
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) {
    if (segment.bytes(peer) > 0) sends.push_back({peer, segment.at(peer), segment.bytes(peer)});
  });
  const auto inputs = gather_blocks(sends, segment.at(rank), segment.bytes(rank));
  combine(op, dtype, inputs, segment.at(rank), segment.bytes(rank) / segment.item);

  sends.clear();
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    if (segment.bytes(rank) > 0) sends.push_back({peer, segment.at(rank), segment.bytes(rank)});
    if (segment.bytes(peer) > 0) receives.push_back({peer, segment.at(peer), segment.bytes(peer)});
  });
  mesh_->exchange(sends, receives);
}

void MeshCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  if (x.nbytes() == 0) return;
  if (x.nbytes() <= kSmallBytes) return all_reduce_small(x, op);
  const std::size_t item = core::size_of(x.dtype);
  const auto size = static_cast<std::size_t>(mesh_->size());
  const auto count = static_cast<std::size_t>(x.numel());
  const std::size_t most = kSegmentBytes / item;
  for (std::size_t at = 0; at < count; at += most) {
    Segment segment{static_cast<std::byte*>(x.data) + at * item, std::min(most, count - at), item,
                    0};
    const std::size_t part = (segment.count + size - 1) / size;
    segment.part = (part + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    all_reduce_segment(segment, x.dtype, op);
  }
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
  const auto inputs = gather_blocks(sends, part(mesh_->rank()), y.nbytes());
  combine(op, y.dtype, inputs, y.data, static_cast<std::size_t>(y.numel()));
}

}  // namespace

std::unique_ptr<Collectives> make_mesh_collectives(std::unique_ptr<Mesh> mesh) {
  return std::make_unique<MeshCollectives>(std::move(mesh));
}

}  // namespace cairn::parallel
