#include "training/snapshot.h"

#include <algorithm>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/copy.h"
#include "io/host_copy.h"
#include "io/work_threads.h"

namespace cairn::checkpointing {

namespace {

const Tensor* defined_tensor(const StateDict::Value& value) {
  const Tensor* tensor = tensor_in(value);
  return tensor != nullptr && tensor->defined() ? tensor : nullptr;
}

void put_tensor(StateDict::Value& value, const Tensor& tensor) {
  auto* shard = std::get_if<Shard>(&value);
  if (shard != nullptr) shard->tensor = tensor;
  if (shard == nullptr) value = tensor;
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

struct Piece {
  const char* from;
  char* to;
  std::size_t bytes;
};

// Memory for a copy, or the copy itself where gathering made one. What is left to do goes to
// `pieces`.
Tensor copied_on_host(const Tensor& x, std::vector<Piece>& pieces) {
  constexpr std::size_t kPiece = std::size_t{2} << 20;
  Tensor host = on_host(x);
  if (!host.same(x)) return host;
  Tensor copy = Tensor::empty(host.shape(), host.dtype(), Device{});
  const auto* from = static_cast<const char*>(host.raw_data());
  auto* to = static_cast<char*>(copy.raw_data());
  for (std::size_t at = 0; at < host.nbytes(); at += kPiece) {
    pieces.push_back({from + at, to + at, std::min(kPiece, host.nbytes() - at)});
  }
  return copy;
}

// All pieces by whichever thread is free, and one wait for all: a wait a tensor would cost a time
// slice each where other programs share the cores.
void copy(const std::vector<Piece>& pieces) {
  constexpr std::uint64_t kMostThreads = 16;  // a socket's memory is busy by then
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  on_threads(threads_for(bytes, kMostThreads), pieces.size(), [&](std::size_t i) {
    kernels::copy_past_caches(pieces[i].from, pieces[i].to, pieces[i].bytes);
  });
}

}  // namespace

std::uint64_t bytes_of(const FlatState& state) {
  std::uint64_t bytes = 0;
  for (const auto& [name, value] : state) {
    if (const Tensor* tensor = defined_tensor(value)) bytes += tensor->nbytes();
  }
  return bytes;
}

FlatState snapshot_of(const FlatState& state) {
  FlatState copies = state;
  std::vector<Tensor> on_gpus;
  std::vector<Piece> pieces;
  const auto copied = [&](const Tensor& x) {
    if (!x.device().is_cpu()) on_gpus.push_back(x);
    return x.device().is_cpu() ? copied_on_host(x, pieces) : copied_from_gpu(x);
  };
  for (auto& [name, value] : copies) {
    const Tensor* tensor = defined_tensor(value);
    if (tensor == nullptr) continue;
    put_tensor(value, copied(Tensor(*tensor)));
    auto* shard = std::get_if<Shard>(&value);
    if (shard != nullptr && shard->rounded.defined()) shard->rounded = copied(shard->rounded);
  }
  copy(pieces);
  for (const Tensor& x : on_gpus) wait_for_device(x);
  return copies;
}

}  // namespace cairn::checkpointing
