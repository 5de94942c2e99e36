// Makes batches: reads samples side by side into one tensor and normalises them.
#pragma once

#include <vector>

#include "cairn/data/loader.h"

namespace cairn::data::detail {

class Collator {
 public:
  Collator(const Dataset& dataset, const LoaderOptions& options);

  /// The samples as a batch in host memory: page-locked where the loader's device is a CUDA device.
  /// Safe from several threads at once.
  Batch collate(std::vector<std::int64_t> indices) const;

 private:
  Tensor host_tensor(const Shape& sample, std::int64_t samples, DType dtype) const;

  const Dataset* dataset_;
  SampleSpec spec_;
  Device device_;
  std::optional<Normalize> normalize_;
  std::vector<float> byte_values_;  // what each u8 becomes
};

}  // namespace cairn::data::detail
