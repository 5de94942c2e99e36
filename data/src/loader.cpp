#include "cairn/data/loader.h"

#include <algorithm>
#include <utility>

#include "collate.h"
#include "device_copy.h"
#include "prefetcher.h"

namespace cairn::data {

namespace {

constexpr const char* kDataLoader = "data_loader";

std::int64_t batches_of(std::int64_t samples, const LoaderOptions& options) {
  const std::int64_t whole = samples / options.batch_size;
  return options.drop_last || samples % options.batch_size == 0 ? whole : whole + 1;
}

void check_options(const LoaderOptions& options) {
  CAIRN_CHECK(options.batch_size >= 1, kDataLoader, "expected a batch size >= 1, got ",
              options.batch_size);
  CAIRN_CHECK(options.workers >= 0, kDataLoader, "expected a number of workers >= 0, got ",
              options.workers);
  CAIRN_CHECK(options.prefetch >= 1, kDataLoader, "expected a prefetch depth >= 1, got ",
              options.prefetch);
  core::check_exists(options.device);
}

}  // namespace

class DataLoader::Run {
 public:
  Run(const Dataset& dataset, Sampler& sampler, const LoaderOptions& options)
      : sampler_(&sampler),
        place_(place_of(sampler)),
        options_(options),
        order_(sampler.remaining_indices()),
        collator_(dataset, options, sampler.seed(), sampler.epoch()),
        prefetcher_([this](std::int64_t k) { return collator_.collate(indices_of(k)); },
                    batches_of(static_cast<std::int64_t>(order_.size()), options), options.workers,
                    options.prefetch) {
    if (options.device != Device{}) copy_.emplace(options.device);
  }

  /// Hands out the next batch and counts it as read; false at the end, which moves the sampler on.
  /// Where it throws, the sampler stands where it stood and the next call tries the same batch.
  bool advance() {
    current_.reset();
    check_place();
    if (!arrived_) {
      if (prefetcher_.finished() && !host_ && (!copy_ || copy_->empty())) {
        sampler_->next_epoch();
        return false;
      }
      arrived_ = copy_ ? fetch_on_device() : prefetcher_.next();
    }
    if (detail::normalizes_on_device(options_)) arrived_->inputs = normalized(arrived_->inputs);
    current_ = std::exchange(arrived_, std::nullopt);
    sampler_->advance(current_->size());
    place_ = place_of(*sampler_);
    return true;
  }
  /// Where a batch could not be handed out: counts it as read all the same.
  void leave_out() {
    CAIRN_CHECK(!current_, kDataLoader,
                "expected to skip after an error, got a batch that was read");
    check_place();
    if (arrived_) {
      arrived_.reset();
    } else if (copy_ && !copy_->empty()) {
      copy_->take();
    } else if (host_) {
      host_.reset();
    } else {
      prefetcher_.skip();
    }
    sampler_->advance(std::min(options_.batch_size, sampler_->remaining()));
    place_ = place_of(*sampler_);
  }
  const Batch& current() const {
    CAIRN_CHECK(current_.has_value(), kDataLoader,
                "expected a batch, got an error while it was read");
    return *current_;
  }

 private:
  // What the order of the samples and their draws depend on.
  struct Place {
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;
    std::int64_t position = 0;
    bool operator==(const Place&) const = default;
  };
  static Place place_of(const Sampler& sampler) {
    return {sampler.seed(), sampler.epoch(), sampler.position()};
  }

  void check_place() const {
    CAIRN_CHECK(place_of(*sampler_) == place_, kDataLoader,
                "expected the sampler where this pass left it, in epoch ", place_.epoch,
                " at sample ", place_.position, ", got epoch ", sampler_->epoch(), ", sample ",
                sampler_->position(),
                " (load a state between passes: leave the loop, begin again)");
  }

  std::vector<std::int64_t> indices_of(std::int64_t k) const {
    const auto begin = static_cast<std::size_t>(k * options_.batch_size);
    const auto end = std::min(begin + static_cast<std::size_t>(options_.batch_size), order_.size());
    return {order_.begin() + static_cast<std::ptrdiff_t>(begin),
            order_.begin() + static_cast<std::ptrdiff_t>(end)};
  }

  void start_copy() {
    if (!host_) host_ = prefetcher_.next();
    copy_->start(*host_);
    host_.reset();
  }

  // One batch ahead is copied while the consumer works on this one.
  void copy_ahead() {
    if (!host_) host_ = prefetcher_.next_if_ready();
    if (!host_) return;
    try {
      start_copy();
    } catch (const std::exception&) {
      // There may be no memory for two batches at once. The copy is tried again, and its error
      // told, when the batch is due.
    }
  }

  Batch fetch_on_device() {
    if (copy_->empty()) start_copy();
    Batch batch = copy_->take();
    copy_ahead();
    return batch;
  }

  Tensor normalized(const Tensor& inputs) const {
    Tensor result = options_.normalize_on_device(inputs, *options_.normalize);
    CAIRN_CHECK(result && result.dtype() == DType::f32 && result.shape() == inputs.shape() &&
                    result.device() == inputs.device(),
                kDataLoader, "expected normalize_on_device to return f32 ", inputs.shape(), " on ",
                inputs.device(), ", got ",
                result ? core::str(result.dtype(), " ", result.shape(), " on ", result.device())
                       : std::string("no tensor"));
    return result;
  }

  Sampler* sampler_;
  Place place_;  // of the sampler, after the batch handed out last
  LoaderOptions options_;
  std::vector<std::int64_t> order_;  // this rank's samples, from the sampler's position on
  detail::Collator collator_;
  std::optional<detail::DeviceCopy> copy_;
  std::optional<Batch> host_;      // made, but its copy is not started
  std::optional<Batch> arrived_;   // on the device, but not handed out
  std::optional<Batch> current_;   // unset: reading it threw
  detail::Prefetcher prefetcher_;  // last: its workers end before what they use
};

DataLoader::DataLoader(const Dataset& dataset, Sampler& sampler, const LoaderOptions& options)
    : dataset_(&dataset), sampler_(&sampler), options_(options) {
  check_options(options);
  CAIRN_CHECK(dataset.size() == sampler.dataset_size(), kDataLoader,
              "expected a sampler of the dataset's ", dataset.size(), " samples, got one of ",
              sampler.dataset_size());
  const detail::Collator checks_normalisation(dataset, options, sampler.seed(), sampler.epoch());
}

DataLoader::Iterator DataLoader::begin() {
  CAIRN_CHECK(running_.expired(), kDataLoader,
              "expected one pass at a time, got a second begin() while an iterator lives");
  Iterator iterator;
  iterator.run_ = std::make_shared<Run>(*dataset_, *sampler_, options_);
  running_ = iterator.run_;
  ++iterator;
  return iterator;
}

std::int64_t DataLoader::batches_per_epoch() const {
  return batches_of(sampler_->samples_per_epoch(), options_);
}

std::int64_t DataLoader::remaining_batches() const {
  return batches_of(sampler_->remaining(), options_);
}

const Batch& DataLoader::Iterator::operator*() const {
  CAIRN_CHECK(run_ != nullptr, kDataLoader, "expected a batch, got the end");
  return run_->current();
}

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  CAIRN_CHECK(run_ != nullptr, kDataLoader, "expected a batch before this one, got the end");
  if (!run_->advance()) run_.reset();
  return *this;
}

void DataLoader::Iterator::skip() {
  CAIRN_CHECK(run_ != nullptr, kDataLoader, "expected a batch to skip, got the end");
  run_->leave_out();
  ++*this;
}

}  // namespace cairn::data
