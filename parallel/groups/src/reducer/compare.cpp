#include "cairn/parallel/compare.h"

#include <cstdint>
#include <map>
#include <sstream>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/kernels/hash_tensors.h"
#include "group/listing.h"

namespace cairn::parallel {
namespace {

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

/// A line a tensor. Each device hashes its part of the list.
std::string list_hashes(const NamedTensors& tensors) {
  std::map<std::pair<DeviceType, int>, std::vector<std::size_t>> of_device;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i].tensor;
    CAIRN_CHECK(x.view().is_dense(), "compare_across_ranks", "expected '", tensors[i].name,
                "' to be dense, got shape ", x.shape(), " with strides ", x.strides());
    of_device[{x.device().type, x.device().index}].push_back(i);
  }
  std::vector<std::uint64_t> hashes(tensors.size());
  for (const auto& [device, places] : of_device) {
    std::vector<TensorView> views;
    for (const std::size_t i : places) views.push_back(tensors[i].tensor);
    const std::vector<std::uint64_t> found = kernels::hash_tensors(views);
    for (std::size_t k = 0; k < places.size(); ++k) hashes[places[k]] = found[k];
  }
  std::ostringstream out;
  for (const std::uint64_t hash : hashes) out << hash << "\n";
  return out.str();
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
    own_hashes = list_hashes(tensors);
    own_listing = list(tensors);
    return digest(own_listing + own_hashes);
  });
  if (all_equal(digests)) return {};
  check_same_lists("compare_across_ranks", "list of tensors",
                   group.exchange(own_listing, "compare_across_ranks, tensors"));
  std::vector<std::vector<std::string>> hashes;
  for (const std::string& lines : group.exchange(own_hashes, "compare_across_ranks, hashes"))
    hashes.push_back(lines_of(lines));
  RankDifference difference;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<int> ranks;
    for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
      if (hashes[rank][i] != hashes[0][i]) ranks.push_back(static_cast<int>(rank));
    }
    if (ranks.empty() || ++difference.tensors > 1) continue;
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
