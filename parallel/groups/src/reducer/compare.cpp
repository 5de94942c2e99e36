#include "cairn/parallel/compare.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "cairn/core/error.h"
#include "cairn/kernels/hash_tensors.h"
#include "group/listing.h"
#include "reducer/names.h"

namespace cairn::parallel {
namespace {

using Hashes = std::vector<std::uint64_t>;

/// A line a tensor.
std::string list(const NamedTensors& tensors) {
  std::ostringstream out;
  for (const auto& [name, tensor] : tensors) {
    out << "'" << name << "' " << tensor.dtype() << tensor.shape();
    if (!tensor.is_contiguous()) out << " with strides " << tensor.strides();
    out << "\n";
  }
  return out.str();
}

/// Each device hashes its part of the list.
Hashes hash(const NamedTensors& tensors) {
  Hashes hashes(tensors.size());
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CAIRN_CHECK(tensors[i].tensor.view().is_dense(), "compare_across_ranks", "expected '",
                tensors[i].name, "' to be dense, got shape ", tensors[i].tensor.shape(),
                " with strides ", tensors[i].tensor.strides());
    left.push_back(i);
  }
  while (!left.empty()) {
    const Device device = tensors[left[0]].tensor.device();
    std::vector<std::size_t> here, elsewhere;
    std::vector<TensorView> views;
    for (std::size_t i : left) {
      const bool is_here = tensors[i].tensor.device() == device;
      (is_here ? here : elsewhere).push_back(i);
      if (is_here) views.push_back(tensors[i].tensor);
    }
    const Hashes found = kernels::hash_tensors(views);
    for (std::size_t k = 0; k < here.size(); ++k) hashes[here[k]] = found[k];
    left = std::move(elsewhere);
  }
  return hashes;
}

/// 8 bytes a tensor.
std::string bytes_of(const Hashes& hashes) {
  return {reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(std::uint64_t)};
}

std::string_view hash_of(const std::string& hashes, std::size_t tensor) {
  return std::string_view(hashes).substr(tensor * sizeof(std::uint64_t), sizeof(std::uint64_t));
}

std::vector<int> ranks_unlike_the_first(const std::vector<std::string>& hashes,
                                        std::size_t tensor) {
  std::vector<int> ranks;
  for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hash_of(hashes[rank], tensor) != hash_of(hashes[0], tensor)) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

}  // namespace

std::string RankDifference::describe() const {
  if (none()) return {};
  std::string text = core::str("'", tensor, "' is not rank 0's on rank");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += core::str(i > 0 ? ", " : ranks.size() > 1 ? "s " : " ", ranks[i]);
  }
  if (tensors == 1) return text;
  return core::str(text, " (and ", tensors - 1, " more tensor",
                   tensors == 2 ? " differs)" : "s differ)");
}

RankDifference compare_across_ranks(const NamedTensors& tensors, const ProcessGroup& group) {
  std::string own_listing, own_hashes;
  const auto digests = group.world().all_or_throw("compare_across_ranks", [&] {
    own_hashes = bytes_of(hash(tensors));
    own_listing = list(tensors);
    return digest(core::str(own_listing.size(), " ", own_listing, own_hashes));
  });
  if (all_equal(digests)) return {};
  check_same_lists("compare_across_ranks", "list of tensors",
                   group.exchange(own_listing, "compare_across_ranks, tensors"));
  const std::vector<std::string> hashes =
      group.exchange(own_hashes, "compare_across_ranks, hashes");
  RankDifference difference;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<int> ranks = ranks_unlike_the_first(hashes, i);
    if (ranks.empty()) continue;
    if (++difference.tensors > 1) continue;
    difference.tensor = tensors[i].name;
    difference.ranks = std::move(ranks);
  }
  return difference;
}

void check_same_across_ranks(const NamedTensors& tensors, const ProcessGroup& group) {
  const RankDifference difference = compare_across_ranks(tensors, group);
  if (difference.none()) return;
  core::fail<core::DataError>("check_same_across_ranks",
                              "expected the same bits on every rank, but ", difference.describe());
}

}  // namespace cairn::parallel
