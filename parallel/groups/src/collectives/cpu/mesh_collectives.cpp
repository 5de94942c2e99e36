// What moves bytes over a mesh: broadcast by a binomial tree; small gathers and the barrier in
// ceil(log2 n) rounds (Bruck's algorithm, dissemination); all else straight from who has it to who
// needs it.
#include "collectives/cpu/mesh_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cairn/core/error.h"
#include "store/broken.h"

namespace cairn::parallel {
namespace {

constexpr std::size_t kSmallGatherBytes = 64 << 10;  // of all ranks together

/// Goes ahead of a message between two ranks.
struct PairHeader {
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint64_t dtype = 0;
  bool operator==(const PairHeader&) const = default;
};

PairHeader header_of(const TensorView& x, std::uint64_t tag) {
  return {tag, x.nbytes(), static_cast<std::uint64_t>(x.dtype)};
}

std::string to_string(const PairHeader& header) {
  std::string dtype = "an unknown dtype";
  if (header.dtype <= static_cast<std::uint64_t>(DType::boolean))
    dtype = core::name(static_cast<DType>(header.dtype));
  return core::str(header.bytes, " bytes of ", dtype, " with tag ", header.tag);
}

}  // namespace

MeshCollectives::MeshCollectives(std::unique_ptr<Mesh> mesh)
    : mesh_(std::move(mesh)),
      sent_(static_cast<std::size_t>(mesh_->size())),
      received_(static_cast<std::size_t>(mesh_->size())) {}

MeshCollectives::Parts MeshCollectives::parts_of(const TensorView& whole, const Counts& counts) {
  Parts parts{static_cast<std::byte*>(whole.data), {0}};
  for (const std::int64_t count : counts)
    parts.begin.push_back(parts.begin.back() +
                          static_cast<std::size_t>(count) * core::size_of(whole.dtype));
  return parts;
}

std::byte* MeshCollectives::workspace(std::size_t bytes) {
  if (!workspace_ || workspace_->bytes() < bytes) {
    workspace_.reset();
    const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
    workspace_ = core::Storage::allocate(bytes, Device{});
  }
  return static_cast<std::byte*>(workspace_->data());
}

void MeshCollectives::broadcast(const TensorView& x, int root) {
  if (x.nbytes() == 0) return;
  const int n = size(), place = (rank() - root + n) % n;
  const auto rank_at = [&](int p) { return (p + root) % n; };
  int bit = 1;
  while (bit < n && (place & bit) == 0) bit <<= 1;
  if (place != 0) mesh_->exchange({}, {{rank_at(place - bit), x.data, x.nbytes()}});
  std::vector<Mesh::Send> sends;
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (place + bit < n) sends.push_back({rank_at(place + bit), x.data, x.nbytes()});
  }
  if (!sends.empty()) mesh_->exchange(sends, {});
}

/// Bruck's algorithm: each round doubles the blocks that a rank has. `space` takes all of them,
/// ours first, then those of the ranks that follow; returns where each rank's block is.
std::vector<std::byte*> MeshCollectives::gather_in_log_rounds(const std::byte* own,
                                                              const std::vector<std::size_t>& bytes,
                                                              std::byte* space) {
  const int n = size();
  const auto rank_at = [&](int place) { return (rank() + place) % n; };
  std::vector<std::size_t> begin{0};
  begin.reserve(static_cast<std::size_t>(n) + 1);
  for (int place = 0; place < n; ++place)
    begin.push_back(begin.back() + bytes[static_cast<std::size_t>(rank_at(place))]);
  const auto at = [&](int place) { return begin[static_cast<std::size_t>(place)]; };
  if (at(1) > 0) std::memcpy(space, own, at(1));
  for (int round = 0, have = 1; have < n; ++round) {
    const int more = std::min(have, n - have);
    std::vector<Mesh::Send> sends;
    std::vector<Mesh::Receive> receives;
    if (at(more) > 0) sends.push_back({rank_at(n - have), space, at(more)});
    if (const std::size_t come = at(have + more) - at(have); come > 0)
      receives.push_back({rank_at(have), space + at(have), come});
    mesh_->start(round, sends, receives)->wait();
    have += more;
  }
  std::vector<std::byte*> blocks(static_cast<std::size_t>(n));
  for (int place = 0; place < n; ++place)
    blocks[static_cast<std::size_t>(rank_at(place))] = space + at(place);
  return blocks;
}

void MeshCollectives::all_gather(const TensorView& x, const TensorView& y, const Counts& counts) {
  const Parts parts = parts_of(y, counts);
  if (parts.total() == 0) return;
  if (parts.bytes(rank()) > 0) std::memmove(parts.at(rank()), x.data, parts.bytes(rank()));
  if (size() > 2 && parts.total() <= kSmallGatherBytes) {
    std::vector<std::size_t> bytes;
    bytes.reserve(counts.size());
    for (int r = 0; r < size(); ++r) bytes.push_back(parts.bytes(r));
    const auto blocks = gather_in_log_rounds(parts.at(rank()), bytes, workspace(parts.total()));
    for_each_peer([&](int peer) {
      if (parts.bytes(peer) > 0)
        std::memcpy(parts.at(peer), blocks[static_cast<std::size_t>(peer)], parts.bytes(peer));
    });
    return;
  }
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    if (parts.bytes(rank()) > 0) sends.push_back({peer, parts.at(rank()), parts.bytes(rank())});
    if (parts.bytes(peer) > 0) receives.push_back({peer, parts.at(peer), parts.bytes(peer)});
  });
  mesh_->exchange(sends, receives);
}

void MeshCollectives::gather(const TensorView& x, const TensorView& y, const Counts& counts,
                             int root) {
  if (rank() != root) {
    if (x.nbytes() > 0) mesh_->exchange({{root, x.data, x.nbytes()}}, {});
    return;
  }
  const Parts parts = parts_of(y, counts);
  if (x.nbytes() > 0) std::memmove(parts.at(root), x.data, x.nbytes());
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    if (parts.bytes(peer) > 0) receives.push_back({peer, parts.at(peer), parts.bytes(peer)});
  });
  mesh_->exchange({}, receives);
}

void MeshCollectives::scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                              int root) {
  if (rank() != root) {
    if (y.nbytes() > 0) mesh_->exchange({}, {{root, y.data, y.nbytes()}});
    return;
  }
  const Parts parts = parts_of(x, counts);
  if (y.nbytes() > 0) std::memmove(y.data, parts.at(root), y.nbytes());
  std::vector<Mesh::Send> sends;
  for_each_peer([&](int peer) {
    if (parts.bytes(peer) > 0) sends.push_back({peer, parts.at(peer), parts.bytes(peer)});
  });
  mesh_->exchange(sends, {});
}

/// Counts that do not fit together must be found before data moves: engines take messages of the
/// size that they expect.
void MeshCollectives::compare_counts(const Counts& send_counts, const Counts& receive_counts) {
  Counts theirs(static_cast<std::size_t>(size()));
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    const auto p = static_cast<std::size_t>(peer);
    sends.push_back({peer, &send_counts[p], sizeof(std::int64_t)});
    receives.push_back({peer, &theirs[p], sizeof(std::int64_t)});
  });
  mesh_->exchange(sends, receives);
  for_each_peer([&](int peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (theirs[p] != receive_counts[p])
      throw GroupBroken("all_to_all",
                        core::str("rank ", rank(), " expected ", receive_counts[p],
                                  " elements from rank ", peer, ", which sends ", theirs[p]));
  });
}

void MeshCollectives::all_to_all(const TensorView& x, const Counts& send_counts,
                                 const TensorView& y, const Counts& receive_counts, bool even) {
  if (!even) compare_counts(send_counts, receive_counts);
  const Parts from = parts_of(x, send_counts), to = parts_of(y, receive_counts);
  if (to.bytes(rank()) > 0) std::memcpy(to.at(rank()), from.at(rank()), to.bytes(rank()));
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for_each_peer([&](int peer) {
    if (from.bytes(peer) > 0) sends.push_back({peer, from.at(peer), from.bytes(peer)});
    if (to.bytes(peer) > 0) receives.push_back({peer, to.at(peer), to.bytes(peer)});
  });
  mesh_->start(1, sends, receives)->wait();
}

void MeshCollectives::barrier() {
  const char here = 1;
  char there = 0;
  for (int round = 0, distance = 1; distance < size(); ++round, distance *= 2) {
    const int to = (rank() + distance) % size(), from = (rank() - distance + size()) % size();
    mesh_->start(round, {{to, &here, 1}}, {{from, &there, 1}})->wait();
  }
}

// ---- Between two ranks: a header, then the data

/// Messages of one direction are numbered; collectives have fingerprints instead.
void MeshCollectives::set_pair_tag(int from, int to, std::uint64_t number) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::uint64_t part : {std::uint64_t{0x70616972}, static_cast<std::uint64_t>(from),
                                   static_cast<std::uint64_t>(to), number})
    hash = (hash ^ part) * 0x100000001b3u;
  mesh_->set_tag(hash);
}

void MeshCollectives::send_with_header(const TensorView& x, int to, std::uint64_t tag,
                                       std::size_t bytes) {
  set_pair_tag(rank(), to, sent_[static_cast<std::size_t>(to)]++);
  const PairHeader header = header_of(x, tag);
  const auto first = mesh_->start(0, {{to, &header, sizeof header}}, {});
  std::unique_ptr<Mesh::Transfer> second;
  if (bytes > 0) second = mesh_->start(1, {{to, x.data, bytes}}, {});
  first->wait();
  if (second) second->wait();
}

void MeshCollectives::send(const TensorView& x, int to, std::uint64_t tag) {
  send_with_header(x, to, tag, x.nbytes());
}

void MeshCollectives::send_header(const TensorView& x, int to, std::uint64_t tag) {
  send_with_header(x, to, tag, 0);
}

void MeshCollectives::receive_header(const TensorView& x, int from, std::uint64_t tag) {
  set_pair_tag(from, rank(), received_[static_cast<std::size_t>(from)]++);
  PairHeader header;
  mesh_->start(0, {}, {{from, &header, sizeof header}})->wait();
  const PairHeader expected = header_of(x, tag);
  if (header != expected)
    throw GroupBroken("recv", core::str("rank ", rank(), " expected ", to_string(expected),
                                        " from rank ", from, ", which sent ", to_string(header)));
}

void MeshCollectives::receive(const TensorView& x, int from, std::uint64_t tag) {
  receive_header(x, from, tag);
  if (x.nbytes() > 0) mesh_->start(1, {}, {{from, x.data, x.nbytes()}})->wait();
}

std::unique_ptr<Collectives> make_mesh_collectives(std::unique_ptr<Mesh> mesh) {
  return std::make_unique<MeshCollectives>(std::move(mesh));
}

}  // namespace cairn::parallel
