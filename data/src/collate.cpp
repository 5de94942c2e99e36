#include "collate.h"

#include "cairn/core/generator.h"
#include "cairn/core/stream.h"

namespace cairn::data::detail {

namespace {

Shape batched(const Shape& sample, std::int64_t samples) {
  Shape shape{samples};
  for (std::int64_t size : sample) shape.push_back(size);
  return shape;
}

float normalized(const Normalize& rule, double x) {
  return static_cast<float>((x * rule.scale - rule.mean) / rule.deviation);
}

// While it lives, the calling thread's generator draws what belongs to a sample, and nothing but
// the seed, the epoch and the sample's number decide what that is. Then it is what it was.
class SampleDraws {
 public:
  SampleDraws(std::uint64_t seed, std::int64_t epoch, std::int64_t index)
      : saved_(Generator::current()) {
    const auto key =
        core::philox(seed, static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(index));
    Generator::current().set(std::uint64_t{key[0]} << 32 | key[1]);
  }
  ~SampleDraws() { Generator::current() = saved_; }
  SampleDraws(const SampleDraws&) = delete;
  SampleDraws& operator=(const SampleDraws&) = delete;

 private:
  Generator saved_;
};

// Sample `i` of a contiguous batch.
TensorView sample_of(const Tensor& batch, std::int64_t i) {
  return batch.view().select(0, i);
}

}  // namespace

bool normalizes_on_device(const LoaderOptions& options) {
  return options.normalize && options.normalize_on_device && options.device != Device{};
}

Collator::Collator(const Dataset& dataset, const LoaderOptions& options, std::uint64_t seed,
                   std::int64_t epoch)
    : dataset_(&dataset),
      spec_(dataset.spec()),
      device_(options.device),
      seed_(seed),
      epoch_(epoch) {
  if (!options.normalize) return;
  CAIRN_CHECK(spec_.input_dtype == DType::u8 || spec_.input_dtype == DType::f32, "data_loader",
              "expected u8 or f32 inputs to normalise, got ", spec_.input_dtype);
  CAIRN_CHECK(options.normalize->deviation > 0.0, "data_loader", "expected a deviation > 0, got ",
              options.normalize->deviation);
  if (normalizes_on_device(options)) return;
  normalize_ = options.normalize;
  for (int byte = 0; byte < 256; ++byte) byte_values_.push_back(normalized(*normalize_, byte));
}

Tensor Collator::host_tensor(const Shape& sample, std::int64_t samples, DType dtype) const {
  const Shape shape = batched(sample, samples);
  if (!device_.is_cuda()) return Tensor::empty(shape, dtype, Device{});
  const core::DeviceGuard guard(device_);
  const auto bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  std::shared_ptr<core::Storage> pinned = core::Storage::allocate_pinned(bytes);
  return Tensor::wrap(TensorView(pinned->data(), shape, dtype), pinned);
}

Batch Collator::collate(std::vector<std::int64_t> indices) const {
  const auto samples = static_cast<std::int64_t>(indices.size());
  const DType dtype = normalize_ ? DType::f32 : spec_.input_dtype;
  Batch batch{host_tensor(spec_.input_shape, samples, dtype),
              host_tensor(spec_.label_shape, samples, spec_.label_dtype), std::move(indices)};
  const bool widen = normalize_ && spec_.input_dtype == DType::u8;
  const Tensor raw =
      widen ? Tensor::empty(batch.inputs.shape(), DType::u8, Device{}) : batch.inputs;
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::int64_t index = batch.indices[static_cast<std::size_t>(i)];
    const SampleDraws draws(seed_, epoch_, index);
    dataset_->read(index, sample_of(raw, i), sample_of(batch.labels, i));
  }
  if (!normalize_) return batch;
  auto* out = batch.inputs.data<float>();
  const std::int64_t n = batch.inputs.numel();
  if (widen) {
    const auto* in = raw.data<std::uint8_t>();
    for (std::int64_t i = 0; i < n; ++i) out[i] = byte_values_[in[i]];
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i] = normalized(*normalize_, out[i]);
  }
  return batch;
}

}  // namespace cairn::data::detail
