#include "cairn/data/loader.h"

#include <algorithm>

#include "collate.h"
#include "device_copy.h"
#include "prefetcher.h"

namespace cairn::data {

namespace {

constexpr const char* kWhere = "data_loader";

std::int64_t batches_of(std::int64_t samples, const LoaderOptions& options) {
  const std::int64_t whole = samples / options.batch_size;
  return options.drop_last || samples % options.batch_size == 0 ? whole : whole + 1;
}

void check_options(const LoaderOptions& options) {
  CAIRN_CHECK(options.batch_size >= 1, kWhere, "expected a batch size >= 1, got ",
              options.batch_size);
  CAIRN_CHECK(options.workers >= 0, kWhere, "expected a number of workers >= 0, got ",
              options.workers);
  CAIRN_CHECK(options.prefetch >= 1, kWhere, "expected a prefetch depth >= 1, got ",
              options.prefetch);
  core::check_exists(options.device);
}

}  // namespace

class DataLoader::Run {
 public:
  Run(const Dataset& dataset, Sampler& sampler, const LoaderOptions& options)
      : sampler_(&sampler),
        options_(options),
        order_(sampler.remaining_indices()),
        collator_(dataset, options),
        prefetcher_([this](std::int64_t k) { return collator_.collate(indices_of(k)); },
                    batches_of(static_cast<std::int64_t>(order_.size()), options), options.workers,
                    options.prefetch) {
    if (options.device != Device{}) copy_.emplace(options.device);
  }

  /// Fetches the next batch and counts it as read; false at the end, which moves the sampler on.
  bool advance() {
    const bool ended = prefetcher_.finished() && (!copy_ || copy_->empty());
    if (ended) {
      sampler_->next_epoch();
      return false;
    }
    current_ = copy_ ? fetch_on_device() : prefetcher_.next();
    sampler_->advance(current_.size());
    return true;
  }
  const Batch& current() const { return current_; }

 private:
  std::vector<std::int64_t> indices_of(std::int64_t k) const {
    const auto begin = static_cast<std::size_t>(k * options_.batch_size);
    const auto end = std::min(begin + static_cast<std::size_t>(options_.batch_size), order_.size());
    return {order_.begin() + static_cast<std::ptrdiff_t>(begin),
            order_.begin() + static_cast<std::ptrdiff_t>(end)};
  }

  // One batch ahead is copied while the consumer works on this one.
  Batch fetch_on_device() {
    if (copy_->empty()) copy_->start(prefetcher_.next());
    Batch batch = copy_->take();
    if (std::optional<Batch> ahead = prefetcher_.next_if_ready()) copy_->start(std::move(*ahead));
    return batch;
  }

  Sampler* sampler_;
  LoaderOptions options_;
  std::vector<std::int64_t> order_;  // this rank's samples, from the sampler's position on
  detail::Collator collator_;
  std::optional<detail::DeviceCopy> copy_;
  Batch current_;
  detail::Prefetcher prefetcher_;  // last: its workers end before what they use
};

DataLoader::DataLoader(const Dataset& dataset, Sampler& sampler, const LoaderOptions& options)
    : dataset_(&dataset), sampler_(&sampler), options_(options) {
  check_options(options);
  CAIRN_CHECK(dataset.size() == sampler.dataset_size(), kWhere,
              "expected a sampler of the dataset's ", dataset.size(), " samples, got one of ",
              sampler.dataset_size());
  const detail::Collator checks_normalisation(dataset, options);
}

DataLoader::Iterator DataLoader::begin() {
  CAIRN_CHECK(running_.expired(), kWhere,
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
  CAIRN_CHECK(run_ != nullptr, kWhere, "expected a batch, got the end");
  return run_->current();
}

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  CAIRN_CHECK(run_ != nullptr, kWhere, "expected a batch before this one, got the end");
  if (!run_->advance()) run_.reset();
  return *this;
}

}  // namespace cairn::data
