#include "cairn/core/dlpack.h"

#include <dlpack/dlpack.h>

#include <array>
#include <memory>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/stream.h"
#include "cuda_interface.h"

namespace cairn::core {

namespace {

// Work that is queued on `after` later starts when `before` has done what it has now.
void order(Device device, void* before, void* after) {
  if (before == after) return;
  const DeviceGuard guard(device);  // a null stream is the current device's
  void* const event = cuda::create_event(device.index);
  cuda::record_event(event, before);
  cuda::wait_event(after, event);
  cuda::destroy_event(event);
}

/// The two streams that use exchanged memory: the second starts after the first, and the first goes
/// on after the second when the exchange ends.
class Exchange {
 public:
  Exchange(Device device, void* first, void* second)
      : device_(device), first_(first), second_(second) {
    if (device_.is_cuda()) order(device_, first_, second_);
  }
  ~Exchange() {
    if (!device_.is_cuda()) return;
    try {
      order(device_, second_, first_);
    } catch (const Error& e) {
      log::error("exchanged memory on {} goes back without order: {}", device_, e.what());
    }
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

 private:
  Device device_;
  void* first_;
  void* second_;
};

// What an exported tensor needs to stay alive: freed by its deleter.
struct Exported {
  Tensor tensor;
  std::unique_ptr<Exchange> exchange;  // ends before the tensor
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  DLManagedTensor managed{};
};

constexpr std::uint8_t kBoolCode = 6;  // kDLBool, which dlpack 0.6 does not name yet

struct DTypePair {
  DType ours;
  std::uint8_t code;
  std::uint8_t bits;
};
constexpr std::array<DTypePair, 9> kDTypes = {{{DType::f16, kDLFloat, 16},
                                               {DType::bf16, kDLBfloat, 16},
                                               {DType::f32, kDLFloat, 32},
                                               {DType::f64, kDLFloat, 64},
                                               {DType::i16, kDLInt, 16},
                                               {DType::i32, kDLInt, 32},
                                               {DType::i64, kDLInt, 64},
                                               {DType::u8, kDLUInt, 8},
                                               {DType::boolean, kBoolCode, 8}}};

DLDataType to_dl(DType dtype) {
  for (const DTypePair& pair : kDTypes) {
    if (pair.ours == dtype) return {pair.code, pair.bits, 1};
  }
  fail("to_dlpack", "expected a dtype that DLPack knows, got ", dtype);
}

DType dtype_from_dl(const DLDataType& theirs) {
  for (const DTypePair& pair : kDTypes) {
    if (theirs.lanes == 1 && pair.code == theirs.code && pair.bits == theirs.bits) return pair.ours;
  }
  fail("from_dlpack",
       "expected f16, bf16, f32, f64, i16, i32, i64, u8 or bool, got DLPack type code ",
       static_cast<int>(theirs.code), " with ", static_cast<int>(theirs.bits), " bits and ",
       theirs.lanes, " lanes");
}

DLDevice to_dl(Device device) {
  if (device.is_cpu()) return {kDLCPU, 0};
  return {kDLCUDA, device.index};
}

Device device_from_dl(const DLDevice& theirs) {
  Device device;
  switch (static_cast<int>(theirs.device_type)) {
    case kDLCPU:
    case kDLCUDAHost:
      return device;
    case kDLCUDA:
      device = {DeviceType::cuda, theirs.device_id};
      break;
    default:
      fail("from_dlpack", "expected memory of a CPU or CUDA device, got DLPack device type ",
           static_cast<int>(theirs.device_type));
  }
  check_exists(device);
  return device;
}

TensorView view_from_dl(const DLTensor& theirs) {
  CAIRN_CHECK(theirs.ndim >= 0 && theirs.ndim <= kMaxDims, "from_dlpack", "expected at most ",
              kMaxDims, " dimensions, got ", theirs.ndim);
  const Shape shape(theirs.shape, theirs.shape + theirs.ndim);
  for (std::int64_t size : shape) {
    CAIRN_CHECK(size >= 0, "from_dlpack", "expected sizes >= 0, got ", shape);
  }
  Strides strides = contiguous_strides(shape);
  if (theirs.strides != nullptr) strides = Strides(theirs.strides, theirs.strides + theirs.ndim);
  for (std::int64_t stride : strides) {
    CAIRN_CHECK(stride >= 0, "from_dlpack", "expected strides >= 0, got ", strides,
                " (copy the tensor first)");
  }
  const DType dtype = dtype_from_dl(theirs.dtype);
  char* data =
      theirs.data == nullptr ? nullptr : static_cast<char*>(theirs.data) + theirs.byte_offset;
  CAIRN_CHECK(reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) == 0, "from_dlpack",
              "expected data aligned to ", size_of(dtype), " bytes for ", dtype, ", got address ",
              static_cast<void*>(data));
  return {data, shape, strides, dtype, device_from_dl(theirs.device)};
}

}  // namespace

DLManagedTensor* to_dlpack(const Tensor& x, void* receivers_stream) {
  const TensorView view = x.view();
  x.storage()->version_counter().give_pointer();
  auto exported = std::make_unique<Exported>();
  exported->tensor = x.detach();
  exported->exchange = std::make_unique<Exchange>(
      view.device, Stream::current(view.device).native(), receivers_stream);
  exported->shape.assign(view.shape.begin(), view.shape.end());
  exported->strides.assign(view.strides.begin(), view.strides.end());
  DLManagedTensor& managed = exported->managed;
  managed.dl_tensor.data = view.data;
  managed.dl_tensor.device = to_dl(view.device);
  managed.dl_tensor.ndim = view.dims();
  managed.dl_tensor.dtype = to_dl(view.dtype);
  managed.dl_tensor.shape = exported->shape.data();
  managed.dl_tensor.strides = exported->strides.data();
  managed.dl_tensor.byte_offset = 0;
  managed.manager_ctx = exported.get();
  managed.deleter = [](DLManagedTensor* self) { delete static_cast<Exported*>(self->manager_ctx); };
  return &exported.release()->managed;
}

Tensor from_dlpack(DLManagedTensor* managed, void* senders_stream) {
  CAIRN_CHECK(managed != nullptr, "from_dlpack", "expected a DLManagedTensor, got null");
  const TensorView view = view_from_dl(managed->dl_tensor);
  // The deleter is armed only when nothing can throw any more.
  struct Owner {
    std::unique_ptr<Exchange> exchange;
    DLManagedTensor* managed = nullptr;
    ~Owner() {
      exchange.reset();
      if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
    }
  };
  auto owner = std::make_shared<Owner>();
  owner->exchange = std::make_unique<Exchange>(view.device, senders_stream,
                                               Stream::current(view.device).native());
  Tensor result = Tensor::wrap(view, owner);
  owner->managed = managed;
  return result;
}

}  // namespace cairn::core
