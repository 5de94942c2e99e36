// Reductions over a mesh.
//
// Large x is cut into segments, and a segment into a piece a rank. Each rank receives its piece
// from all others, combines it in rank order and hands the result on: to all (all_reduce), to the
// root (reduce) or to nobody (reduce_scatter). all_reduce sends and receives 2 (n - 1) / n of x,
// the least possible, in x's dtype. While one segment is combined, the next one's pieces and the
// last one's results are on their way. Small x goes whole to who needs the result instead, with the
// same bits.
#include <algorithm>

#include "collectives/cpu/combine.h"
#include "collectives/cpu/mesh_collectives.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kSmallBytes = 16 << 10;        // sent whole to everybody
constexpr std::size_t kSmallTotalBytes = 256 << 10;  // of all ranks together
constexpr int kDirectRanks = 8;                      // up to which everybody sends to everybody
constexpr std::size_t kPieceAlignment = 64;          // elements
// Of one rank's piece of a segment, in bytes: with many ranks segments grow, because what a message
// costs however short it is would count for more than its data.
constexpr std::size_t kLeastPiece = 64 << 10;

}  // namespace

struct MeshCollectives::Reduction {
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32;
  std::byte* space = nullptr;  // two blocks for each rank
  std::size_t block = 0;       // bytes
  /// Where this rank's piece of a segment goes once it is combined.
  std::function<std::byte*(const MessageChunk&)> result;
  /// Hands it on; may be null.
  std::function<std::unique_ptr<Mesh::Transfer>(const MessageChunk&)> spread;
};

bool MeshCollectives::is_small(std::size_t bytes) const {
  return bytes <= kSmallBytes &&
         (size() <= kDirectRanks || bytes * static_cast<std::size_t>(size()) <= kSmallTotalBytes);
}

/// Starts to receive one block from every peer into `space` while sending them theirs (sends_); our
/// own block is `own`.
MeshCollectives::Gathering MeshCollectives::start_gathering(int round, std::byte* own,
                                                            std::size_t bytes, std::byte* space) {
  Gathering gathering;
  gathering.blocks.assign(static_cast<std::size_t>(size()), own);
  receives_.clear();
  for_each_peer([&](int peer) {
    std::byte* block = space + bytes * static_cast<std::size_t>(peer);
    gathering.blocks[static_cast<std::size_t>(peer)] = block;
    if (bytes > 0) receives_.push_back({peer, block, bytes});
  });
  gathering.transfer = mesh_->start(round, sends_, receives_);
  return gathering;
}

void MeshCollectives::reduce_small(const TensorView& x, void* out, ReduceOp op) {
  const auto n = static_cast<std::size_t>(size());
  auto* own = static_cast<std::byte*>(x.data);
  std::byte* space = workspace(x.nbytes() * n);
  const auto count = static_cast<std::size_t>(x.numel());
  if (size() > kDirectRanks) {
    const auto blocks = gather_in_log_rounds(own, std::vector<std::size_t>(n, x.nbytes()), space);
    return combine(op, x.dtype, {blocks.begin(), blocks.end()}, out, count);
  }
  sends_.clear();
  for_each_peer([&](int peer) { sends_.push_back({peer, own, x.nbytes()}); });
  const Gathering all = start_gathering(0, own, x.nbytes(), space);
  all.transfer->wait();
  combine(op, x.dtype, all.blocks, out, count);
}

void MeshCollectives::reduce_small_to_root(const TensorView& x, const TensorView& y, ReduceOp op,
                                           int root) {
  if (rank() != root) return mesh_->exchange({{root, x.data, x.nbytes()}}, {});
  std::byte* space = workspace(x.nbytes() * static_cast<std::size_t>(size()));
  sends_.clear();
  const Gathering all = start_gathering(0, static_cast<std::byte*>(x.data), x.nbytes(), space);
  all.transfer->wait();
  combine(op, x.dtype, all.blocks, y.data, static_cast<std::size_t>(x.numel()));
}

std::vector<MeshCollectives::MessageChunk> MeshCollectives::segments_of(const TensorView& x) const {
  const std::size_t item = core::size_of(x.dtype);
  const auto n = static_cast<std::size_t>(size());
  const auto count = static_cast<std::size_t>(x.numel());
  const std::size_t most = std::max(mesh_->segment_bytes(), n * kLeastPiece) / item;
  std::vector<MessageChunk> segments;
  for (std::size_t at = 0; at < count; at += most) {
    const std::size_t here = std::min(most, count - at);
    const std::size_t piece =
        ((here + n - 1) / n + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    MessageChunk segment{static_cast<int>(segments.size()), {}, {}};
    for (std::size_t r = 0; r < n; ++r) {
      const std::size_t begin = std::min(here, piece * r), end = std::min(here, begin + piece);
      segment.at.push_back(static_cast<std::byte*>(x.data) + (at + begin) * item);
      segment.bytes.push_back((end - begin) * item);
    }
    segments.push_back(std::move(segment));
  }
  return segments;
}

std::vector<MeshCollectives::MessageChunk> MeshCollectives::segments_of_parts(
    const Parts& parts, std::size_t item) const {
  const auto n = static_cast<std::size_t>(size());
  const std::size_t most =
      std::max(mesh_->segment_bytes() / n, kLeastPiece) / item * item;  // of each part
  std::size_t longest = 0;
  for (int r = 0; r < size(); ++r) longest = std::max(longest, parts.bytes(r));
  std::vector<MessageChunk> segments;
  for (std::size_t at = 0; at < longest; at += most) {
    MessageChunk segment{static_cast<int>(segments.size()), {}, {}};
    for (int r = 0; r < size(); ++r) {
      const std::size_t begin = std::min(at, parts.bytes(r));
      segment.at.push_back(parts.at(r) + begin);
      segment.bytes.push_back(std::min(most, parts.bytes(r) - begin));
    }
    segments.push_back(std::move(segment));
  }
  return segments;
}

/// Segments use two halves of the space by turns.
MeshCollectives::Gathering MeshCollectives::gather_segment(const MessageChunk& segment,
                                                           const Reduction& reduction) {
  const std::size_t half = reduction.block * static_cast<std::size_t>(size());
  std::byte* space = reduction.space + (segment.index % 2 == 0 ? 0 : half);
  sends_.clear();
  for_each_peer([&](int peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (segment.bytes[p] > 0) sends_.push_back({peer, segment.at[p], segment.bytes[p]});
  });
  const auto me = static_cast<std::size_t>(rank());
  return start_gathering(2 * segment.index, segment.at[me], segment.bytes[me], space);
}

void MeshCollectives::reduce_segments(const std::vector<MessageChunk>& segments,
                                      const Reduction& reduction) {
  if (segments.empty()) return;
  const auto me = static_cast<std::size_t>(rank());
  const std::size_t item = core::size_of(reduction.dtype);
  std::unique_ptr<Mesh::Transfer> spreading;
  std::unique_ptr<Mesh::Transfer> last;  // whose pieces the others may still read
  Gathering next = gather_segment(segments.front(), reduction);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const MessageChunk& segment = segments[i];
    Gathering pieces = std::move(next);  // NOLINT(bugprone-use-after-move): set anew below
    const bool ended = pieces.transfer->wait_received();
    if (i + 1 < segments.size()) next = gather_segment(segments[i + 1], reduction);
    combine(reduction.op, reduction.dtype, pieces.blocks, reduction.result(segment),
            segment.bytes[me] / item);
    if (spreading) spreading->wait();
    if (last) last->wait();
    last = ended ? nullptr : std::move(pieces.transfer);
    if (reduction.spread) spreading = reduction.spread(segment);
  }
  if (last) last->wait();
  if (spreading) spreading->wait();
}

void MeshCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  if (x.nbytes() == 0) return;
  if (is_small(x.nbytes())) return reduce_small(x, x.data, op);
  const auto me = static_cast<std::size_t>(rank());
  const std::vector<MessageChunk> segments = segments_of(x);
  const std::size_t block = segments.front().bytes.front();
  const auto spread = [&](const MessageChunk& segment) {
    std::vector<Mesh::Send> sends;
    std::vector<Mesh::Receive> receives;
    for_each_peer([&](int peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (segment.bytes[me] > 0) sends.push_back({peer, segment.at[me], segment.bytes[me]});
      if (segment.bytes[p] > 0) receives.push_back({peer, segment.at[p], segment.bytes[p]});
    });
    return mesh_->start(2 * segment.index + 1, sends, receives);
  };
  reduce_segments(segments,
                  {op, x.dtype, workspace(2 * block * static_cast<std::size_t>(size())), block,
                   [me](const MessageChunk& segment) { return segment.at[me]; }, spread});
}

void MeshCollectives::reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) {
  if (x.nbytes() == 0) return;
  if (is_small(x.nbytes())) return reduce_small_to_root(x, y, op, root);
  const auto me = static_cast<std::size_t>(rank());
  const auto* in = static_cast<const std::byte*>(x.data);
  auto* out = static_cast<std::byte*>(y.data);
  const std::vector<MessageChunk> segments = segments_of(x);
  const std::size_t block = segments.front().bytes.front();
  const std::size_t blocks = 2 * block * static_cast<std::size_t>(size());
  std::byte* space = workspace(blocks + 2 * block);
  const auto result = [&](const MessageChunk& segment) {
    if (rank() == root) return out + (segment.at[me] - in);
    return space + blocks + (segment.index % 2 == 0 ? 0 : block);
  };
  const auto spread = [&](const MessageChunk& segment) {
    std::vector<Mesh::Send> sends;
    std::vector<Mesh::Receive> receives;
    if (rank() != root && segment.bytes[me] > 0)
      sends.push_back({root, result(segment), segment.bytes[me]});
    for_each_peer([&](int peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (rank() == root && segment.bytes[p] > 0)
        receives.push_back({peer, out + (segment.at[p] - in), segment.bytes[p]});
    });
    return mesh_->start(2 * segment.index + 1, sends, receives);
  };
  reduce_segments(segments, {op, x.dtype, space, block, result, spread});
}

void MeshCollectives::reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                                     ReduceOp op) {
  const Parts parts = parts_of(x, counts);
  const auto me = static_cast<std::size_t>(rank());
  const std::vector<MessageChunk> segments = segments_of_parts(parts, core::size_of(x.dtype));
  if (segments.empty()) return;
  const std::size_t block = segments.front().bytes[me];
  const auto result = [&](const MessageChunk& segment) {
    return static_cast<std::byte*>(y.data) + (segment.at[me] - parts.at(rank()));
  };
  reduce_segments(segments, {op, x.dtype, workspace(2 * block * static_cast<std::size_t>(size())),
                             block, result, nullptr});
}

}  // namespace cairn::parallel
