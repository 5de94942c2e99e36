// The run so far in bounded memory: what the page and metrics.prom are made of.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "histogram.h"
#include "image.h"
#include "records.h"

namespace cairn::observe {

/// A curve's values of the steps [key * width, (key + 1) * width).
struct Bucket {
  std::int64_t key = 0, count = 0, not_finite = 0;
  // Of those that are finite.
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  double sum = 0;

  void add(double value);
  void merge(const Bucket& other);
  double mean() const { return sum / static_cast<double>(count - not_finite); }
};

struct Curve {
  std::string name;
  double last = 0;
  std::vector<Bucket> buckets;  // by rising key
};

/// A parameter as it was seen last, and when its gradient was nearest to its dtype's limit.
struct Layer {
  LayerRecord last;
  double least_bits = std::numeric_limits<double>::infinity();
  std::int64_t least_step = 0;
};

class History {
 public:
  void add(const StepRecord& record);
  void add(const EventRecord& event);
  void add(const LayerRecord& record);
  void add(ImageRecord record);
  void add(TextRecord record);
  void add_summary(const NamedValues& values);  // in place of earlier ones of these names

  const std::vector<Curve>& curves() const { return curves_; }
  const Curve* find(std::string_view name) const;
  /// Steps of a bucket: a power of two, the same in all curves.
  std::int64_t width() const { return width_; }
  std::int64_t last_step() const { return last_step_; }
  const std::deque<EventRecord>& events() const { return events_; }  // the last kMostEvents
  std::int64_t events(EventKind kind) const { return counts_[static_cast<std::size_t>(kind)]; }
  double last_checkpoint() const { return last_checkpoint_; }  // time; 0: none
  /// The step with the most memory in all.
  const StepRecord& most_memory() const { return most_memory_; }
  const std::vector<Layer>& layers() const { return layers_; }        // the first kMostNames
  const std::vector<ImageRecord>& images() const { return images_; }  // the last of each name
  const std::vector<TextRecord>& texts() const { return texts_; }     // the same
  const NamedValues& summary() const { return summary_; }
  bool too_many_names() const { return too_many_names_; }

 private:
  static constexpr std::size_t kMostEvents = 500, kMostBuckets = kMostPoints / 2, kMostShown = 16;
  Curve* curve(const std::string& name);
  void widen();
  void note_memory(const StepRecord& record);

  std::vector<Curve> curves_;
  std::int64_t width_ = 1, first_step_ = -1, last_step_ = 0;
  std::deque<EventRecord> events_;
  std::array<std::int64_t, kEventKinds> counts_{};
  double last_checkpoint_ = 0, most_bytes_ = 0;
  StepRecord most_memory_;
  std::vector<Layer> layers_;
  std::vector<ImageRecord> images_;
  std::vector<TextRecord> texts_;
  NamedValues summary_;
  bool too_many_names_ = false;
};

}  // namespace cairn::observe
