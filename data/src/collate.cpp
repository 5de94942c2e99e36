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

float normalized(const Normalize& rule, std::int64_t channel, double x) {
  return static_cast<float>((x * rule.scale - rule.mean.of(channel)) / rule.deviation.of(channel));
}

void check(const Normalize& rule, const SampleSpec& spec) {
  CAIRN_CHECK(spec.input_dtype == DType::u8 || spec.input_dtype == DType::f32, "data_loader",
              "expected u8 or f32 inputs to normalise, got ", spec.input_dtype);
  for (const double deviation : rule.deviation.values())
    CAIRN_CHECK(deviation > 0.0, "data_loader", "expected a deviation > 0, got ", deviation);
  for (const std::vector<double>* each : {&rule.mean.values(), &rule.deviation.values()}) {
    const auto count = static_cast<std::int64_t>(each->size());
    const bool fits = !spec.input_shape.empty() && spec.input_shape[0] == count;
    CAIRN_CHECK(count == 1 || fits, "data_loader",
                "expected one mean and deviation, or one for each channel of samples ",
                spec.input_shape, ", got ", count);
  }
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
  check(*options.normalize, spec_);
  if (normalizes_on_device(options)) return;
  normalize_ = options.normalize;
  for (std::int64_t channel = 0; channel < normalize_->channels(); ++channel) {
    for (int byte = 0; byte < 256; ++byte)
      byte_values_.push_back(normalized(*normalize_, channel, byte));
  }
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
  if (normalize_) normalize(raw, batch.inputs);
  return batch;
}

/// `raw` may be `out`.
void Collator::normalize(const Tensor& raw, const Tensor& out) const {
  const std::int64_t channels = normalize_->channels(), planes = channels * out.size(0),
                     pixels = planes == 0 ? 0 : out.numel() / planes;
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    const std::int64_t channel = plane % channels, begin = plane * pixels;
    float* const to = out.data<float>() + begin;
    if (raw.dtype() == DType::u8) {
      const std::uint8_t* const from = raw.data<std::uint8_t>() + begin;
      const float* const values = byte_values_.data() + 256 * channel;
      for (std::int64_t i = 0; i < pixels; ++i) to[i] = values[from[i]];
    } else {
      for (std::int64_t i = 0; i < pixels; ++i) to[i] = normalized(*normalize_, channel, to[i]);
    }
  }
}

}  // namespace cairn::data::detail
