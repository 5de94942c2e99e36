// DataLoader: batches of a dataset in a sampler's order, read ahead by worker threads.
//
// The batches are the same, in the same order, for any number of workers. On another device than
// cpu:0 a batch is staged in page-locked memory and copied on a stream of its own, one batch ahead,
// while the consumer computes; it arrives ordered with the consumer's current stream. Leaving the
// loop early stops the workers.
//
// A batch counts as read once it is handed out: a state saved at the end of the loop's body
// continues with the next batch. begin() starts where the sampler stands; the end of the epoch
// moves the sampler to the next one.
//
// What reading a batch threw is rethrown when that batch is due, and no batch is lost by it: the
// sampler stands before the batch, and the next ++ (or the next begin()) reads it again. A batch
// whose samples are damaged for good is left out by Iterator::skip(), or where begin() threw, by
// sampler.advance() and another begin().
//
// A data set may draw random numbers (crops, noise) from core::Generator::current(): while sample i
// is read, that generator is seeded from the sampler's seed, its epoch and i, and afterwards it is
// what it was. The draws of a sample therefore differ from epoch to epoch and are the same for any
// number of workers and ranks, any batch size, and after a resume in the middle of an epoch.
//
//   data::DataLoader loader(train, sampler, {.batch_size = 64, .normalize = data::Normalize{}});
//   for (const data::Batch& batch : loader) train_step(batch);
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/data/dataset.h"
#include "cairn/data/samplers.h"

namespace cairn::data {

/// One number for all channels, or one for each: of samples [C, ...].
class PerChannel {
 public:
  PerChannel(double all) : values_{all} {}
  PerChannel(std::initializer_list<double> each) : values_(each) {}
  double of(std::int64_t channel) const {
    return values_.size() == 1 ? values_.front() : values_.at(static_cast<std::size_t>(channel));
  }
  const std::vector<double>& values() const { return values_; }

 private:
  std::vector<double> values_;
};

/// inputs become f32: (x * scale - mean) / deviation. The defaults map u8 to [0, 1]; MNIST's own
/// are mean 0.1307, deviation 0.3081.
struct Normalize {
  double scale = 1.0 / 255.0;
  PerChannel mean = 0.0;
  PerChannel deviation = 1.0;

  std::int64_t channels() const {  // 1: all alike
    return static_cast<std::int64_t>(std::max(mean.values().size(), deviation.values().size()));
  }
};

struct LoaderOptions {
  std::int64_t batch_size = 1;         // samples of this rank
  int workers = 1;                     // threads; 0 reads in the consumer's thread
  int prefetch = 4;                    // batches ready or in the making ahead of the consumer
  bool drop_last = false;              // leave out a last batch with fewer samples
  Device device = {};                  // where the batches arrive
  std::optional<Normalize> normalize;  // for u8 and f32 inputs
  /// Applies the rule to a batch's inputs on `device`, in the consumer's thread and stream, and
  /// returns f32 of the same shape. Where it is set and `device` is not cpu:0, inputs travel as the
  /// data set stores them (images: a quarter of the bytes) and are normalised there; otherwise the
  /// workers normalise before the batch travels. data computes on no device itself, hence a
  /// function.
  std::function<Tensor(const Tensor& inputs, const Normalize& rule)> normalize_on_device;
};

/// inputs [B, ...] and labels [B, ...] contiguous on the loader's device; indices: the samples'
/// numbers in the dataset.
struct Batch {
  Tensor inputs;
  Tensor labels;
  std::vector<std::int64_t> indices;
  std::int64_t size() const { return static_cast<std::int64_t>(indices.size()); }
};

/// In a training state it stands for its sampler: give one of the two.
class DataLoader : public core::Stateful {
 public:
  /// The dataset and the sampler must outlive the loader, and have the same size.
  DataLoader(const Dataset& dataset, Sampler& sampler, const LoaderOptions& options);

  class Run;  // one pass over (the rest of) an epoch
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = const Batch*;
    using reference = const Batch&;

    const Batch& operator*() const;  // throws InvalidArgument at the end and after a ++ that threw
    const Batch* operator->() const { return &**this; }
    /// Fetches the next batch; rethrows what reading it threw, and then the next ++ tries again.
    /// Throws InvalidArgument where the sampler was moved since this pass's last batch.
    Iterator& operator++();
    /// After a ++ that threw: leaves the batch that was due out, on this rank, and fetches the next
    /// one as ++ does. Throws InvalidArgument where nothing threw.
    void skip();
    bool operator==(const Iterator& other) const { return run_ == other.run_; }

   private:
    friend class DataLoader;
    std::shared_ptr<Run> run_;  // null: the end
  };

  /// Starts reading at the sampler's position. One pass at a time: throws InvalidArgument while
  /// another iterator lives.
  Iterator begin();
  Iterator end() const { return {}; }

  StateDict state_dict() const override { return sampler_->state_dict(); }
  void load_state_dict(const StateDict& state) override { sampler_->load_state_dict(state); }

  std::int64_t batches_per_epoch() const;
  std::int64_t remaining_batches() const;  // from the sampler's position to the end of the epoch
  const LoaderOptions& options() const { return options_; }

 private:
  const Dataset* dataset_;
  Sampler* sampler_;
  LoaderOptions options_;
  std::weak_ptr<Run> running_;
};

}  // namespace cairn::data
