// Makes batches: reads samples side by side into one tensor and normalises them, unless that is the
// device's work.
#pragma once

#include <vector>

#include "cairn/data/loader.h"

namespace cairn::data::detail {

/// Whether inputs travel as they are stored, to be normalised on the device.
bool normalizes_on_device(const LoaderOptions& options);

class Collator {
 public:
  /// `seed` and `epoch` are what the samples' random numbers come from.
  Collator(const Dataset& dataset, const LoaderOptions& options, std::uint64_t seed,
           std::int64_t epoch);

  /// The samples as a batch in host memory: page-locked where the loader's device is a CUDA device.
  /// Safe from several threads at once.
  Batch collate(std::vector<std::int64_t> indices) const;

 private:
  void normalize(const Tensor& raw, const Tensor& out) const;
  Tensor host_tensor(const Shape& sample, std::int64_t samples, DType dtype) const;

  const Dataset* dataset_;
  SampleSpec spec_;
  Device device_;
  std::uint64_t seed_;
  std::int64_t epoch_;
  std::optional<Normalize> normalize_;  // unset: not here
  std::vector<float> byte_values_;      // [channels, 256]: what each u8 becomes
};

}  // namespace cairn::data::detail
