// The collectives and messages of a communicator.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/tensor.h"
#include "collectives/nccl/nccl_collectives.h"

namespace cairn::parallel {
namespace {

using core::Stream;

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::i16:
      core::fail("nccl", "expected a dtype that NCCL computes with, got i16");
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
    case DType::boolean:
      return ncclUint8;
  }
  core::fail("nccl", "unknown dtype ", static_cast<int>(dtype));
}

/// For collectives that only move elements.
ncclDataType_t moved_type_of(DType dtype) {
  return dtype == DType::i16 ? ncclFloat16 : type_of(dtype);
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return ncclSum;
    case ReduceOp::mean:
      return ncclAvg;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::min:
      return ncclMin;
    case ReduceOp::product:
      return ncclProd;
  }
  core::fail("nccl", "unknown operation ", static_cast<int>(op));
}

std::size_t count(const TensorView& x) {
  return static_cast<std::size_t>(x.numel());
}

bool are_even(const Counts& counts) {
  return std::equal(counts.begin() + 1, counts.end(), counts.begin());
}

/// Rank r's part of a tensor that is cut by counts.
TensorView part_of(const TensorView& whole, const Counts& counts, std::size_t r) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < r; ++i) before += counts[i];
  auto* data = static_cast<std::byte*>(whole.data) +
               static_cast<std::size_t>(before) * core::size_of(whole.dtype);
  return {data, {counts[r]}, whole.dtype, whole.device};
}

void copy_own_part(const TensorView& x, const TensorView& y) {
  if (x.numel() == 0 || x.data == y.data) return;
  core::copy_bytes(TensorView(x.data, {x.numel()}, x.dtype, x.device),
                   TensorView(y.data, {y.numel()}, y.dtype, y.device));
}

/// The calls of a group; what fails first is its result.
class Calls {
 public:
  void add(ncclResult_t result) {
    if (result_ == ncclSuccess && is_error(result)) result_ = result;
  }
  ncclResult_t result() const { return result_; }

 private:
  ncclResult_t result_ = ncclSuccess;
};

}  // namespace

template <class Call>
void NcclCollectives::run(const char* name, const TensorView& x, Call&& call) {
  CAIRN_CHECK(x.device == device_, name, "expected tensors on this rank's ", device_,
              ", got one on ", x.device);
  const core::DeviceGuard guard(device_);
  const Stream stream = Stream::current(device_);
  std::optional<InFlight> started;
  if (core::capturing()) {
    watch_replays();
  } else {
    started = start(stream);
  }
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_aborted(what_);
    result = call(static_cast<cudaStream_t>(stream.native()));
  }
  finish(what_, result);
  if (started) watch(std::move(*started), stream);
}

/// Calls that NCCL does as one, at the same time.
template <class F>
void NcclCollectives::run_group(const char* name, const TensorView& x, F&& calls) {
  run(name, x, [&](cudaStream_t stream) {
    if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) return result;
    Calls group;
    calls(group, stream);
    const ncclResult_t end = ncclGroupEnd();
    return group.result() == ncclSuccess ? end : group.result();
  });
}

void NcclCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  if (x.numel() == 0) return;
  run("all_reduce", x, [&](cudaStream_t stream) {
    return ncclAllReduce(x.data, x.data, count(x), type_of(x.dtype), op_of(op), communicator_,
                         stream);
  });
}

void NcclCollectives::broadcast(const TensorView& x, int root) {
  if (x.numel() == 0) return;
  run("broadcast", x, [&](cudaStream_t stream) {
    return ncclBroadcast(x.data, x.data, count(x), moved_type_of(x.dtype), root, communicator_,
                         stream);
  });
}

void NcclCollectives::reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) {
  if (x.numel() == 0) return;
  run("reduce", x, [&](cudaStream_t stream) {
    return ncclReduce(x.data, y.data, count(x), type_of(x.dtype), op_of(op), root, communicator_,
                      stream);
  });
}

/// Uneven parts: each is broadcast by its rank.
void NcclCollectives::all_gather(const TensorView& x, const TensorView& y, const Counts& counts) {
  if (y.numel() == 0) return;
  const ncclDataType_t type = moved_type_of(y.dtype);
  if (are_even(counts)) {
    return run("all_gather", y, [&](cudaStream_t stream) {
      return ncclAllGather(x.data, y.data, count(x), type, communicator_, stream);
    });
  }
  run_group("all_gather", y, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] == 0) continue;
      const TensorView part = part_of(y, counts, r);
      const void* own = static_cast<int>(r) == rank_ ? x.data : part.data;
      calls.add(ncclBroadcast(own, part.data, count(part), type, static_cast<int>(r), communicator_,
                              stream));
    }
  });
}

void NcclCollectives::gather(const TensorView& x, const TensorView& y, const Counts& counts,
                             int root) {
  const ncclDataType_t type = moved_type_of(x.dtype);
  if (rank_ != root) return send_to(x, root);
  copy_own_part(x, part_of(y, counts, static_cast<std::size_t>(root)));
  run_group("gather", y, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (static_cast<int>(r) == root || counts[r] == 0) continue;
      const TensorView part = part_of(y, counts, r);
      calls.add(ncclRecv(part.data, count(part), type, static_cast<int>(r), communicator_, stream));
    }
  });
}

void NcclCollectives::scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                              int root) {
  const ncclDataType_t type = moved_type_of(y.dtype);
  if (rank_ != root) return receive_from(y, root);
  copy_own_part(part_of(x, counts, static_cast<std::size_t>(root)), y);
  run_group("scatter", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (static_cast<int>(r) == root || counts[r] == 0) continue;
      const TensorView part = part_of(x, counts, r);
      calls.add(ncclSend(part.data, count(part), type, static_cast<int>(r), communicator_, stream));
    }
  });
}

/// Uneven parts: each is reduced to its rank.
void NcclCollectives::reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                                     ReduceOp op) {
  if (x.numel() == 0) return;
  const ncclDataType_t type = type_of(x.dtype);
  if (are_even(counts)) {
    return run("reduce_scatter", x, [&](cudaStream_t stream) {
      return ncclReduceScatter(x.data, y.data, count(y), type, op_of(op), communicator_, stream);
    });
  }
  run_group("reduce_scatter", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] == 0) continue;
      const TensorView part = part_of(x, counts, r);
      void* out = static_cast<int>(r) == rank_ ? y.data : nullptr;
      calls.add(ncclReduce(part.data, out, count(part), type, op_of(op), static_cast<int>(r),
                           communicator_, stream));
    }
  });
}

void NcclCollectives::all_to_all(const TensorView& x, const Counts& send_counts,
                                 const TensorView& y, const Counts& receive_counts, bool /*even*/) {
  const ncclDataType_t type = moved_type_of(x.dtype);
  const auto me = static_cast<std::size_t>(rank_);
  copy_own_part(part_of(x, send_counts, me), part_of(y, receive_counts, me));
  run_group("all_to_all", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < send_counts.size(); ++r) {
      if (r == me) continue;
      const TensorView out = part_of(x, send_counts, r), in = part_of(y, receive_counts, r);
      const int peer = static_cast<int>(r);
      if (send_counts[r] > 0)
        calls.add(ncclSend(out.data, count(out), type, peer, communicator_, stream));
      if (receive_counts[r] > 0)
        calls.add(ncclRecv(in.data, count(in), type, peer, communicator_, stream));
    }
  });
}

void NcclCollectives::barrier() {
  const core::DeviceGuard guard(device_);
  const auto one = core::Storage::allocate(sizeof(float), device_);
  const TensorView x(one->data(), {1}, DType::u8, device_);
  all_reduce(x, ReduceOp::max);  // of bytes that nobody reads
  wait();
}

void NcclCollectives::send_to(const TensorView& x, int to) {
  if (x.numel() == 0) return;
  run("send", x, [&](cudaStream_t stream) {
    return ncclSend(x.data, count(x), moved_type_of(x.dtype), to, communicator_, stream);
  });
}

void NcclCollectives::receive_from(const TensorView& x, int from) {
  if (x.numel() == 0) return;
  run("recv", x, [&](cudaStream_t stream) {
    return ncclRecv(x.data, count(x), moved_type_of(x.dtype), from, communicator_, stream);
  });
}

void NcclCollectives::send(const TensorView& x, int to, std::uint64_t /*tag*/) {
  send_to(x, to);
}

void NcclCollectives::receive(const TensorView& x, int from, std::uint64_t /*tag*/) {
  receive_from(x, from);
}

}  // namespace cairn::parallel
