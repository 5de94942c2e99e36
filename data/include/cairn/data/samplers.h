// Samplers: which samples are read, in which order, and where in that order the training stands.
//
// A sampler orders the N samples of an epoch anew for every epoch; each of R ranks takes every R-th
// of them. DistributedSampler's order is torch.utils.data.DistributedSampler's, index for index
// (randperm on MT19937 seeded with seed + epoch, padded from the front to a multiple of R, or cut
// with drop_last). RandomSampler is the same with one rank; SequentialSampler does not shuffle.
//
// The position counts samples of the whole job, over all ranks, so one state fits every rank, and a
// run that is resumed in the middle of an epoch with another number of ranks still reads each
// remaining sample. How often is said by what happens where R does not divide the samples: padding
// reads fewer than R of them twice, drop_last leaves fewer than R out, and `exact` reads each once,
// ranks ending one sample apart. The loader moves the sampler on at the end of an epoch, so nobody
// has to call set_epoch; a call with the number of the current epoch leaves the position alone.
//
//   data::DistributedSampler sampler(train.size(), {.world = group.world(), .seed = 1});
//   while (sampler.epoch() < epochs) {
//     for (const data::Batch& batch : loader) train_step(batch);
//   }
#pragma once

#include <cstdint>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"

namespace cairn::data {

/// A permutation of 0 ... n-1: torch.randperm(n, generator=torch.Generator().manual_seed(seed)) on
/// the CPU.
std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed);

class Sampler : public core::Stateful {
 public:
  std::int64_t dataset_size() const { return size_; }
  /// Samples of this rank in a whole epoch: ceil(N / R), floor(N / R) with drop_last, and with
  /// `exact` one or the other.
  std::int64_t samples_per_epoch() const;
  /// Samples of this rank from the position to the end of the epoch.
  std::int64_t remaining() const;
  /// The indices of these samples, in order.
  std::vector<std::int64_t> remaining_indices() const;

  std::int64_t epoch() const { return epoch_; }
  std::int64_t position() const { return position_; }  // samples read in this epoch, over all ranks
  std::uint64_t seed() const { return order_.seed; }
  /// Marks this rank's next `samples` as read, and as many of every other rank. Throws
  /// InvalidArgument for more than remaining().
  void advance(std::int64_t samples);
  /// Goes to the start of an epoch, unless it is the current one: then the position stays.
  void set_epoch(std::int64_t epoch);
  void next_epoch() { set_epoch(epoch_ + 1); }

  StateDict state_dict() const override;  // epoch, position, seed, shuffle, dataset_size
  /// Goes to where the state was saved; its seed replaces this sampler's. Throws DataError, and
  /// changes nothing, where the state belongs to a dataset of another size or to another kind of
  /// order.
  void load_state_dict(const StateDict& state) override;

 protected:
  struct Order {
    std::int64_t world_size = 1;
    std::int64_t rank = 0;
    bool shuffle = false;
    std::uint64_t seed = 0;
    bool drop_last = false;
    bool exact = false;
  };
  Sampler(const char* name, std::int64_t dataset_size, const Order& order);

 private:
  std::int64_t share(std::int64_t samples) const;
  const char* name_;
  std::int64_t size_;
  Order order_;
  std::int64_t epoch_ = 0;
  std::int64_t position_ = 0;
};

/// Reads 0 ... N-1 in order, on one rank.
class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(std::int64_t dataset_size);
};

/// Reads torch_randperm(N, seed + epoch), on one rank.
class RandomSampler : public Sampler {
 public:
  RandomSampler(std::int64_t dataset_size, std::uint64_t seed);
};

struct DistributedSamplerOptions {
  World world = {};  // the ranks that share the samples
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Where the ranks do not divide the samples: true leaves the last ones out, false reads the
  /// epoch's first ones once more, so that every rank has as many.
  bool drop_last = false;
  /// Reads each sample once: the first ranks may have one sample, and one batch, more than the
  /// others. For evaluation (with data::Mean) and for training under DistributedDataParallel::join.
  /// Save rank 0's state, which never ends first. Not with drop_last.
  bool exact = false;
};

class DistributedSampler : public Sampler {
 public:
  /// A collective of the world, if that can exchange. Throws InvalidArgument for a negative size, a
  /// rank outside of the world and options that contradict each other, and on every rank where
  /// these differ between ranks (with seeds of their own they would read some samples several times
  /// and others never).
  DistributedSampler(std::int64_t dataset_size, const DistributedSamplerOptions& options);
};

}  // namespace cairn::data
