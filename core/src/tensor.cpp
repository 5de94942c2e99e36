#include "cairn/core/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cairn/core/graph.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "cuda_interface.h"
#include "element.h"
#include "host_view.h"

namespace cairn::core {

struct Tensor::Impl {
  std::shared_ptr<Storage> storage;
  TensorView view;
  struct Meta {
    bool requires_grad = false;
    std::unique_ptr<GradientSlot> slot;  // null: nobody has asked for it
    TensorAttachments attachments;
    std::string name;
  };
  std::unique_ptr<Meta> meta;  // null: nobody has asked for it

  Meta& need_meta() {
    if (!meta) meta = std::make_unique<Meta>();
    return *meta;
  }
};

namespace {

constexpr std::int64_t kGrain = 1 << 18;  // bytes or elements one thread fills or copies at least

std::size_t bytes_of(const Shape& shape, DType dtype) {
  std::int64_t n = 1;
  bool overflow = false;
  for (std::int64_t size : shape) {
    CAIRN_CHECK(size >= 0, "tensor", "expected sizes >= 0, got ", shape);
    overflow = overflow || __builtin_mul_overflow(n, size, &n);
  }
  const auto width = static_cast<std::int64_t>(size_of(dtype));
  CAIRN_CHECK(!overflow && n <= std::numeric_limits<std::int64_t>::max() / width, "tensor",
              "expected a size that fits 64 bits, got ", shape, " ", dtype);
  return static_cast<std::size_t>(n * width);
}

void fill_host(const TensorView& view, double value) {
  dispatch_all(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T element = convert<T>(value);
    parallel_for(view.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::fill(view.as<T>() + begin, view.as<T>() + end, element);
    });
  });
}

void zero_bytes(const Tensor& x) {
  if (x.nbytes() == 0) return;
  if (x.device().is_cuda()) {
    cuda::zero(x.raw_data(), x.nbytes(), x.device().index, Stream::current(x.device()).native());
    return;
  }
  parallel_for(static_cast<std::int64_t>(x.nbytes()), kGrain,
               [data = x.view().as<char>()](std::int64_t begin, std::int64_t end) {
                 std::memset(data + begin, 0, static_cast<std::size_t>(end - begin));
               });
}

void copy_host(const TensorView& src, const TensorView& dst) {
  parallel_for(static_cast<std::int64_t>(src.nbytes()), kGrain,
               [&](std::int64_t begin, std::int64_t end) {
                 std::memcpy(dst.as<char>() + begin, src.as<char>() + begin,
                             static_cast<std::size_t>(end - begin));
               });
}

// What the earlier device's current stream has so far comes before what the later one's gets from
// now on.
void order(Device earlier, Device later) {
  Event done(earlier);
  done.record(Stream::current(earlier));
  Stream::current(later).wait(done);
}

// Queued on the destination's stream if that is CUDA's, else on the source's; a CPU side's queued
// work is waited for first. Between two GPUs the source's stream comes before and after.
void copy_with_cuda(const TensorView& src, const TensorView& dst) {
  for (const Device device : {src.device, dst.device}) {
    if (device.is_cpu()) Stream::current(device).synchronize();
  }
  const Device where = dst.device.is_cuda() ? dst.device : src.device;
  const bool between_gpus =
      src.device.is_cuda() && dst.device.is_cuda() && src.device != dst.device;
  if (between_gpus) {
    refuse_in_capture("copy", "a copy between GPUs");
    order(src.device, dst.device);
  }
  cuda::copy(dst.data, dst.device, src.data, src.device, src.nbytes(),
             Stream::current(where).native());
  if (between_gpus) order(dst.device, src.device);
}

void fill_cuda(const TensorView& view, double value) {
  if (view.numel() == 0) return;
  dispatch_all(view.dtype, [&](auto zero) {
    const auto element = convert<decltype(zero)>(value);
    cuda::fill(view.data, &element, sizeof(element), static_cast<std::size_t>(view.numel()),
               view.device.index, Stream::current(view.device).native());
  });
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  return empty_strided(shape, contiguous_strides(shape), dtype, device);
}

Tensor Tensor::empty_strided(const Shape& shape, const Strides& strides, DType dtype,
                             Device device) {
  auto impl = std::make_shared<Impl>();
  impl->view = TensorView(nullptr, shape, strides, dtype, device);
  const std::size_t bytes = bytes_of(shape, dtype);
  CAIRN_CHECK(strides.dims() == shape.dims() && impl->view.is_dense(), "empty_strided",
              "expected dense strides for ", shape, ", got ", strides);
  impl->storage = Storage::allocate(bytes, device);
  impl->view.data = impl->storage->data();
  return Tensor(std::move(impl));
}

Tensor Tensor::empty_like(const Tensor& x) {
  const TensorView view = x.view();
  if (view.is_dense()) return empty_strided(view.shape, view.strides, view.dtype, view.device);
  return empty(view.shape, view.dtype, view.device);
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  Tensor result = empty(shape, dtype, device);
  zero_bytes(result);
  return result;
}

Tensor Tensor::full(const Shape& shape, double value, DType dtype, Device device) {
  Tensor result = empty(shape, dtype, device);
  device.is_cpu() ? fill_host(result, value) : fill_cuda(result, value);
  return result;
}

template <class T>
Tensor Tensor::from(const std::vector<T>& values, const Shape& shape, DType dtype, Device device) {
  CAIRN_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(), "from", "expected ",
              shape.numel(), " values for shape ", shape, ", got ", values.size());
  Tensor host = empty(shape, dtype, device.is_cpu() ? device : Device{});
  dispatch_all(dtype, [&](auto zero) {
    using To = decltype(zero);
    To* out = host.view().as<To>();
    for (std::size_t i = 0; i < values.size(); ++i) out[i] = convert<To>(static_cast<T>(values[i]));
  });
  if (device.is_cpu()) return host;
  Tensor result = empty(shape, dtype, device);
  copy_bytes(host, result);
  return result;
}

Tensor Tensor::wrap(const TensorView& view, std::shared_ptr<void> owner) {
  auto impl = std::make_shared<Impl>();
  impl->view = view;
  const auto bytes = static_cast<std::size_t>(span_of(view)) * size_of(view.dtype);
  CAIRN_CHECK(bytes == 0 || view.data != nullptr, "wrap", "expected memory for ", view.shape,
              ", got a null pointer");
  impl->storage = Storage::wrap(view.data, bytes, view.device, std::move(owner));
  return Tensor(std::move(impl));
}

Tensor Tensor::wrap_within(const TensorView& view, std::size_t begin, std::size_t elements,
                           std::function<const void*()> whereabouts) {
  const auto wanted = static_cast<std::size_t>(view.numel());
  CAIRN_CHECK(begin <= elements && wanted <= elements - begin, "wrap", "expected ", wanted,
              " elements for ", view.shape, ", got a vector of ", elements, " from element ", begin,
              " on");
  Tensor tensor = wrap(view);
  if (wanted > 0) tensor.storage()->set_whereabouts(std::move(whereabouts));
  return tensor;
}

void Tensor::fail_moved() const {
  fail("tensor", "expected the elements of ", name().empty() ? "a tensor" : name(), " ", shape(),
       " to stay where they were when the vector was wrapped, got a vector that has moved them "
       "since "
       "(it has grown, or was moved from: give it its size first, wrap it then)");
}

const Tensor::Impl& Tensor::impl() const {
  CAIRN_CHECK(defined(), "tensor", "expected a tensor, got an undefined one");
  return *impl_;
}

TensorView Tensor::view() const {
  TensorView view = impl().view;
  const Storage& storage = *impl_->storage;
  if (storage.returnable()) view.data = storage.locate(view.data);
  if (storage.whereabouts() != storage.data()) fail_moved();
  view.version = &impl_->storage->version_counter();
  return view;
}
const Shape& Tensor::shape() const {
  return impl().view.shape;
}
const Strides& Tensor::strides() const {
  return impl().view.strides;
}
DType Tensor::dtype() const {
  return impl().view.dtype;
}
Device Tensor::device() const {
  return impl().view.device;
}
bool Tensor::is_contiguous() const {
  return impl().view.is_contiguous();
}
void* Tensor::raw_data() const {
  void* data = impl().view.data;
  return impl_->storage->returnable() ? impl_->storage->locate(data) : data;
}
const std::shared_ptr<Storage>& Tensor::storage() const {
  return impl().storage;
}

bool Tensor::unique() const {
  return impl_.use_count() == 1 && impl_->storage.use_count() == 1;
}

template <class T>
T* Tensor::data() const {
  CAIRN_CHECK(dtype() == dtype_of<T>, "data", "expected a tensor of ", core::name(dtype_of<T>),
              ", got ", dtype(), " ", shape());
  impl_->storage->version_counter().give_pointer();
  return static_cast<T*>(raw_data());
}

Tensor Tensor::detach() const {
  auto same = std::make_shared<Impl>();
  same->storage = impl().storage;
  same->view = impl().view;
  return Tensor(std::move(same));
}

Tensor Tensor::alias(const TensorView& view) const {
  const Storage& whole = *storage();
  const auto bytes = static_cast<std::size_t>(span_of(view)) * size_of(view.dtype);
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  const auto whole_begin = reinterpret_cast<std::uintptr_t>(whole.data());
  const bool inside = begin >= whole_begin && begin + bytes <= whole_begin + whole.bytes();
  CAIRN_CHECK(bytes == 0 || inside, "alias", "expected a view into the tensor's ", whole.bytes(),
              " bytes, got ", view.shape, " ", view.dtype, " outside of them");
  CAIRN_CHECK(view.device == whole.device(), "alias", "expected a view on ", whole.device(),
              ", got ", view.device);
  auto impl = std::make_shared<Impl>();
  impl->storage = impl_->storage;
  impl->view = view;
  if (whole.returnable()) impl->view.data = whole.origin_of(view.data);
  return Tensor(std::move(impl));
}

void Tensor::set_data(const Tensor& data) {
  CAIRN_CHECK(defined() && data.defined(), "set_data", "expected tensors, got an undefined one");
  const TensorView &former = impl_->view, &other = data.impl_->view;
  const bool dtype_changes = former.dtype != other.dtype;
  const bool only_values = !dtype_changes && former.device == other.device &&
                           former.shape == other.shape && former.strides == other.strides;
  if (Impl::Meta* meta = impl_->meta.get()) {
    CAIRN_CHECK(!meta->requires_grad || is_floating(data.dtype()), "set_data",
                "expected a floating dtype for a tensor that requires grad, got ", data.dtype());
    meta->attachments.graph = nullptr;
    meta->attachments.parts = nullptr;
    if (meta->slot && !only_values) {
      meta->slot->clear();
      meta->slot->release_sum();
      meta->slot->displace();
    }
    if (dtype_changes) meta->attachments.master = nullptr;
  }
  impl_->storage = data.impl_->storage;
  impl_->view = data.impl_->view;
}

bool Tensor::requires_grad() const {
  return impl_ != nullptr && impl_->meta != nullptr && impl_->meta->requires_grad;
}

Tensor& Tensor::set_requires_grad(bool value) {
  if (!value && !requires_grad()) return *this;
  CAIRN_CHECK(!value || is_floating(dtype()), "set_requires_grad",
              "expected a tensor of floating dtype, got ", dtype(), " ", shape());
  impl_->need_meta().requires_grad = value;
  return *this;
}

GradientSlot& Tensor::gradient_slot() const {
  impl();
  std::unique_ptr<GradientSlot>& slot = impl_->need_meta().slot;
  if (!slot) slot = std::make_unique<GradientSlot>();
  return *slot;
}

const GradientSlot* Tensor::gradient_slot_or_null() const {
  return defined() && impl_->meta ? impl_->meta->slot.get() : nullptr;
}

TensorAttachments& Tensor::attachments() const {
  impl();
  return impl_->need_meta().attachments;
}

const TensorAttachments* Tensor::attachments_or_null() const {
  return defined() && impl_->meta ? &impl_->meta->attachments : nullptr;
}

const std::string& Tensor::name() const {
  static const std::string none;
  return impl().meta ? impl_->meta->name : none;
}

void Tensor::set_name(std::string name) {
  impl();
  impl_->need_meta().name = std::move(name);
}

Tensor Tensor::grad() const {
  const GradientSlot* slot = gradient_slot_or_null();
  return slot == nullptr ? Tensor() : slot->whole_gradient(name());
}

void Tensor::set_grad(const Tensor& grad) {
  if (!grad.defined()) return clear_grad();
  CAIRN_CHECK(grad.shape() == shape(), "set_grad", "expected a gradient of shape ", shape(),
              ", got ", grad.shape());
  GradientSlot& slot = gradient_slot();
  CAIRN_CHECK(!slot.placed(), "set_grad", "expected a tensor whose gradient is its own, got '",
              name(), "' with a slot in an arena (copy into grad() instead)");
  slot.set_own(grad);
}

void Tensor::clear_grad() {
  if (gradient_slot_or_null() != nullptr) gradient_slot().clear();
}

double Tensor::item() const {
  CAIRN_CHECK(numel() == 1, "item", "expected one element, got shape ", shape());
  return to_vector<double>().front();
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  const HostView host(view());
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(numel()));
  dispatch_all(dtype(), [&](auto zero) {
    using From = decltype(zero);
    for_each_element<From>(host.view(), [&](From x) { values.push_back(convert<T>(x)); });
  });
  return values;
}

// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define CAIRN_INSTANTIATE(T)                                                           \
  template Tensor Tensor::from<T>(const std::vector<T>&, const Shape&, DType, Device); \
  template std::vector<T> Tensor::to_vector<T>() const;                                \
  template T* Tensor::data<T>() const;
// NOLINTEND(bugprone-macro-parentheses)
CAIRN_INSTANTIATE(Half)
CAIRN_INSTANTIATE(BFloat16)
CAIRN_INSTANTIATE(float)
CAIRN_INSTANTIATE(double)
CAIRN_INSTANTIATE(std::int32_t)
CAIRN_INSTANTIATE(std::int64_t)
CAIRN_INSTANTIATE(std::uint8_t)
CAIRN_INSTANTIATE(bool)
#undef CAIRN_INSTANTIATE

void copy_bytes(const TensorView& src, const TensorView& dst) {
  const bool alike = src.shape == dst.shape && src.dtype == dst.dtype && src.is_dense() &&
                     (same_layout(src, dst) || src.numel() == 0);
  CAIRN_CHECK(alike, "copy_bytes", "expected dense tensors of equal shape, strides and dtype, got ",
              src.shape, " ", src.strides, " ", src.dtype, " and ", dst.shape, " ", dst.strides,
              " ", dst.dtype);
  if (src.nbytes() == 0 || src.data == dst.data) return;
  dst.bump_version();
  if (src.device.is_cuda() || dst.device.is_cuda()) return copy_with_cuda(src, dst);
  Stream::current(dst.device).submit([=] { copy_host(src, dst); });
}

}  // namespace cairn::core
