#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "collectives/nccl_backend.h"

namespace cairn::parallel {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(1);

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
  }
  core::fail("nccl", "unknown operation ", static_cast<int>(op));
}

std::size_t count(const TensorView& x) {
  return static_cast<std::size_t>(x.numel());
}

/// A non-blocking communicator: calls return at once and are finished by polling, so that abort()
/// ends them from another thread.
class NcclCollectives : public Collectives {
 public:
  explicit NcclCollectives(const Membership& membership);
  ~NcclCollectives() override;
  void begin(std::uint64_t /*fingerprint*/) override {
  }  // NCCL has no tags; the ledger alone finds what differs
  void all_reduce(const TensorView& x, ReduceOp op) override;
  void broadcast(const TensorView& x, int root) override;
  void all_gather(const TensorView& x, const TensorView& y) override;
  void reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op) override;
  void abort() noexcept override;

 private:
  template <class Call>
  void run(const char* name, const TensorView& x, Call&& call);
  void finish(const char* name, ncclResult_t result, std::chrono::milliseconds timeout);
  [[noreturn]] void fail(const char* name, ncclResult_t result) const;

  Device device_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // the communicator: abort() comes from the watchdog's thread
  ncclComm_t communicator_ = nullptr;
  std::atomic<bool> aborted_ = false;
};

ncclUniqueId shared_id(const Membership& membership) {
  ncclUniqueId id;
  if (membership.rank == 0) {
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess) {
      core::fail<core::CommunicationError>("nccl", "cannot start: ", ncclGetErrorString(result));
    }
    membership.store->set("nccl/id", {id.internal, sizeof id.internal});
    return id;
  }
  const std::string bytes = membership.store->get("nccl/id", membership.timeout);
  if (bytes.size() != sizeof id.internal)
    core::fail<core::CommunicationError>("nccl", "got an id of ", bytes.size(),
                                         " bytes from rank 0");
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

NcclCollectives::NcclCollectives(const Membership& membership)
    : device_(membership.device), timeout_(membership.timeout) {
  const core::DeviceGuard guard(device_);
  const ncclUniqueId id = shared_id(membership);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result =
      ncclCommInitRankConfig(&communicator_, membership.world_size, id, membership.rank, &config);
  try {
    finish("initialisation", result, timeout_);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCollectives::~NcclCollectives() {
  abort();
}

void NcclCollectives::abort() noexcept {
  aborted_ = true;
  const std::lock_guard lock(mutex_);
  if (communicator_ != nullptr) ncclCommAbort(communicator_);
  communicator_ = nullptr;
}

void NcclCollectives::fail(const char* name, ncclResult_t result) const {
  core::fail<core::CommunicationError>("nccl", name, " failed on ", device_, ": ",
                                       ncclGetErrorString(result), " (NCCL_DEBUG=INFO tells more)");
}

/// Waits until the call has done its work on the host; the device's part is in the stream.
void NcclCollectives::finish(const char* name, ncclResult_t result,
                             std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    if (result != ncclSuccess && result != ncclInProgress) fail(name, result);
    {
      const std::lock_guard lock(mutex_);
      if (aborted_ || communicator_ == nullptr)
        core::fail<core::CommunicationError>("nccl", name, " was aborted");
      if (const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &result);
          asked != ncclSuccess)
        fail(name, asked);
    }
    if (result == ncclSuccess) return;
    if (std::chrono::steady_clock::now() > deadline)
      core::fail<core::CommunicationError>("nccl", name, " did not finish in time");
    if (result == ncclInProgress) std::this_thread::sleep_for(kPoll);
  }
}

template <class Call>
void NcclCollectives::run(const char* name, const TensorView& x, Call&& call) {
  CAIRN_CHECK(x.device == device_, name, "expected tensors on this rank's ", device_,
              ", got one on ", x.device);
  if (x.numel() == 0) return;
  const core::DeviceGuard guard(device_);
  const auto stream = static_cast<cudaStream_t>(core::Stream::current(device_).native());
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_ || communicator_ == nullptr)
      core::fail<core::CommunicationError>("nccl", name, " was aborted");
    result = call(stream);
  }
  finish(name, result, timeout_);
}

void NcclCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  run("all_reduce", x, [&](cudaStream_t stream) {
    return ncclAllReduce(x.data, x.data, count(x), type_of(x.dtype), op_of(op), communicator_,
                         stream);
  });
}

void NcclCollectives::broadcast(const TensorView& x, int root) {
  run("broadcast", x, [&](cudaStream_t stream) {
    return ncclBroadcast(x.data, x.data, count(x), moved_type_of(x.dtype), root, communicator_,
                         stream);
  });
}

void NcclCollectives::all_gather(const TensorView& x, const TensorView& y) {
  run("all_gather", x, [&](cudaStream_t stream) {
    return ncclAllGather(x.data, y.data, count(x), moved_type_of(x.dtype), communicator_, stream);
  });
}

void NcclCollectives::reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op) {
  run("reduce_scatter", y, [&](cudaStream_t stream) {
    return ncclReduceScatter(x.data, y.data, count(y), type_of(x.dtype), op_of(op), communicator_,
                             stream);
  });
}

}  // namespace

std::unique_ptr<Collectives> connect_nccl(const Membership& membership) {
  return std::make_unique<NcclCollectives>(membership);
}

}  // namespace cairn::parallel
