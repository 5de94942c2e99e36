#include "snapshot.h"

#include <algorithm>
#include <cstring>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "host_copy.h"

namespace cairn::checkpointing {

namespace {

constexpr std::int64_t kPiece = 1 << 20;  // bytes that one thread copies at once

const Tensor* tensor_in(const StateDict::Value& value) {
  const auto* tensor = std::get_if<Tensor>(&value);
  return tensor != nullptr && tensor->defined() ? tensor : nullptr;
}

Tensor page_locked(const Tensor& x) {
  const core::DeviceGuard guard(x.device());
  std::shared_ptr<core::Storage> memory = core::Storage::allocate_pinned(x.nbytes());
  return Tensor::wrap(TensorView(memory->data(), x.shape(), x.strides(), x.dtype()), memory);
}

// Queued on the device; wait_for_device ends it.
Tensor copied_from_gpu(const Tensor& x) {
  CAIRN_CHECK(x.view().is_dense(), "state", "expected dense memory on ", x.device(), ", got ",
              x.shape(), " with strides ", x.strides(), " (make it contiguous first)");
  Tensor copy = page_locked(x);
  core::copy_bytes(x, copy);
  return copy;
}

Tensor copied_on_host(const Tensor& x) {
  Tensor host = on_host(x);
  if (!host.same(x)) return host;  // gathered: a copy already
  Tensor copy = Tensor::empty(host.shape(), host.dtype(), Device{});
  const auto bytes = static_cast<std::int64_t>(host.nbytes());
  const char* from = static_cast<const char*>(host.raw_data());
  char* to = static_cast<char*>(copy.raw_data());
  core::parallel_for(bytes, kPiece, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
  return copy;
}

}  // namespace

std::uint64_t bytes_of(const FlatState& state) {
  std::uint64_t bytes = 0;
  for (const auto& [name, value] : state) {
    if (const Tensor* tensor = tensor_in(value)) bytes += tensor->nbytes();
  }
  return bytes;
}

FlatState snapshot_of(const FlatState& state) {
  FlatState copies = state;
  std::vector<Tensor> on_gpus;
  for (auto& [name, value] : copies) {
    const Tensor* tensor = tensor_in(value);
    if (tensor == nullptr) continue;
    const Tensor x = *tensor;
    if (!x.device().is_cpu()) on_gpus.push_back(x);
    value = x.device().is_cpu() ? copied_on_host(x) : copied_from_gpu(x);
  }
  for (const Tensor& x : on_gpus) wait_for_device(x);
  return copies;
}

}  // namespace cairn::checkpointing
