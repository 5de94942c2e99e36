#include "cairn/data/samplers.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>

namespace cairn::data {

// torch's CPU algorithm (aten/src/ATen/native/TensorFactories.cpp): Fisher-Yates from the front
// with 32-bit draws, and, where n is so large that their remainder would be uneven, from the inside
// out with 64-bit draws. Only the low 32 bits of the seed count.
std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed) {
  CAIRN_CHECK(n >= 0, "torch_randperm", "expected n >= 0, got ", n);
  std::mt19937 engine(static_cast<std::uint32_t>(seed));
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const auto size = static_cast<std::uint64_t>(n);
  if (size < std::numeric_limits<std::uint32_t>::max() / 20) {
    for (std::uint64_t i = 0; i + 1 < size; ++i)
      std::swap(order[i], order[i + engine() % (size - i)]);
    return order;
  }
  for (std::uint64_t i = 0; i < size; ++i) {
    const std::uint64_t high = engine(), low = engine();
    const std::uint64_t z = (high << 32 | low) % (i + 1);
    order[i] = order[z];
    order[z] = static_cast<std::int64_t>(i);
  }
  return order;
}

Sampler::Sampler(const char* name, std::int64_t dataset_size, const Order& order)
    : name_(name), size_(dataset_size), order_(order) {
  CAIRN_CHECK(size_ >= 0, name_, "expected a dataset size >= 0, got ", size_);
  CAIRN_CHECK(order_.world_size >= 1, name_, "expected a world size >= 1, got ", order_.world_size);
  CAIRN_CHECK(order_.rank >= 0 && order_.rank < order_.world_size, name_,
              "expected a rank of 0 to ", order_.world_size - 1, ", got ", order_.rank);
  CAIRN_CHECK(!order_.drop_last || !order_.exact, name_,
              "expected drop_last or exact, got both (exact reads every sample)");
}

// Samples of this rank where the ranks share `samples`: all that rank 0 has, or its own.
std::int64_t Sampler::share(std::int64_t samples) const {
  if (order_.drop_last) return std::max<std::int64_t>(samples, 0) / order_.world_size;
  const std::int64_t first = order_.exact ? order_.rank : 0;
  return samples <= first ? 0 : (samples - first - 1) / order_.world_size + 1;
}

std::int64_t Sampler::samples_per_epoch() const {
  return share(size_);
}

std::int64_t Sampler::remaining() const {
  return share(size_ - position_);
}

// The job's order is the permutation, repeated as often as padding needs; this rank takes every
// R-th from the position on.
std::vector<std::int64_t> Sampler::remaining_indices() const {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(remaining()));
  if (indices.empty()) return indices;
  std::vector<std::int64_t> order;
  if (order_.shuffle)
    order = torch_randperm(size_, order_.seed + static_cast<std::uint64_t>(epoch_));
  std::int64_t at = position_ + order_.rank;
  for (std::int64_t& index : indices) {
    const std::int64_t place = at % size_;
    index = order_.shuffle ? order[static_cast<std::size_t>(place)] : place;
    at += order_.world_size;
  }
  return indices;
}

void Sampler::advance(std::int64_t samples) {
  CAIRN_CHECK(samples >= 0 && samples <= remaining(), name_, "expected to advance by 0 to ",
              remaining(), " samples, got ", samples);
  position_ += samples * order_.world_size;
  if (order_.exact) position_ = std::min(position_, size_);
}

void Sampler::set_epoch(std::int64_t epoch) {
  CAIRN_CHECK(epoch >= 0, name_, "expected an epoch >= 0, got ", epoch);
  if (epoch == epoch_) return;
  epoch_ = epoch;
  position_ = 0;
}

StateDict Sampler::state_dict() const {
  StateDict state;
  state.set("epoch", epoch_);
  state.set("position", position_);
  state.set("seed", static_cast<std::int64_t>(order_.seed));
  state.set("shuffle", std::int64_t{order_.shuffle});
  state.set("dataset_size", size_);
  return state;
}

namespace {

constexpr const char* kKeys[] = {"epoch", "position", "seed", "shuffle", "dataset_size"};

// Everything that is missing, surplus or of another kind, in one text; empty if the state is a
// sampler's.
std::string key_problems(const StateDict& state) {
  std::string problems;
  for (const char* key : kKeys) {
    const StateDict::Value* value = state.find(key);
    if (value == nullptr) problems += core::str(" missing '", key, "'");
    if (value != nullptr && !std::holds_alternative<std::int64_t>(*value))
      problems += core::str(" no integer '", key, "'");
  }
  for (const StateDict::Entry& entry : state) {
    const bool known = std::any_of(std::begin(kKeys), std::end(kKeys),
                                   [&](const char* key) { return entry.first == key; });
    if (!known) problems += core::str(" surplus '", entry.first, "'");
  }
  return problems;
}

}  // namespace

void Sampler::load_state_dict(const StateDict& state) {
  const std::string problems = key_problems(state);
  if (!problems.empty())
    core::fail<core::DataError>(name_, "expected a sampler's state, got one with", problems);
  const std::int64_t size = state.integer("dataset_size"), shuffle = state.integer("shuffle");
  if (size != size_ || shuffle != std::int64_t{order_.shuffle}) {
    core::fail<core::DataError>(name_, "expected the state of ", size_, " samples ",
                                order_.shuffle ? "shuffled" : "in order", ", got one of ", size,
                                " samples ", shuffle != 0 ? "shuffled" : "in order",
                                " (another dataset or sampler?)");
  }
  const std::int64_t epoch = state.integer("epoch"), position = state.integer("position");
  if (epoch < 0 || position < 0) {
    core::fail<core::DataError>(name_, "expected an epoch and a position >= 0, got ", epoch,
                                " and ", position);
  }
  epoch_ = epoch;
  position_ = position;
  order_.seed = static_cast<std::uint64_t>(state.integer("seed"));
}

SequentialSampler::SequentialSampler(std::int64_t dataset_size)
    : Sampler("sequential_sampler", dataset_size, {}) {}

RandomSampler::RandomSampler(std::int64_t dataset_size, std::uint64_t seed)
    : Sampler("random_sampler", dataset_size, {.shuffle = true, .seed = seed}) {}

namespace {

std::string words_for(std::int64_t dataset_size, const DistributedSamplerOptions& options) {
  return core::str(dataset_size, " samples ",
                   options.shuffle ? core::str("shuffled by seed ", options.seed) : "in order",
                   options.drop_last ? " with drop_last" : "", options.exact ? ", exact" : "");
}

/// Shares of different orders overlap, and leave samples out.
void check_same_order(const World& world, const std::string& own) {
  if (world.size == 1) return;
  const auto ranks = world.exchange(own, "the sampler's order");
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    CAIRN_CHECK(ranks[rank] == ranks[0], "distributed_sampler",
                "expected one order of the samples, of which each rank takes its share, got ",
                ranks[0], " on rank 0 and ", ranks[rank], " on rank ", rank,
                " (give every rank the same seed, dataset and options)");
  }
}

}  // namespace

DistributedSampler::DistributedSampler(std::int64_t dataset_size,
                                       const DistributedSamplerOptions& options)
    : Sampler("distributed_sampler", dataset_size,
              {options.world.size, options.world.rank, options.shuffle, options.seed,
               options.drop_last, options.exact}) {
  check_same_order(options.world, words_for(dataset_size, options));
}

}  // namespace cairn::data
