// NCCL's entry points.
#include <nccl.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/sim/nccl_communicator.h"
#include "gpu/sim/nccl_math.h"

namespace cairn::gpusim {
namespace {

using Pointer = std::shared_ptr<Communicator>;

/// A communicator in the hands of one thread; NCCL's calls are not safe to make from two at once.
class Use {
 public:
  Use(ncclComm_t handle, const char* call) : communicator_(communicator_of(handle, call)) {
    if (communicator_->users.fetch_add(1) != 0) {
      report("nccl threads", std::string(call) + " while another thread is inside of a call with " +
                                 "the same communicator");
    }
  }
  ~Use() { communicator_->users.fetch_sub(1); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  Communicator* operator->() const { return communicator_.get(); }
  Communicator& operator*() const { return *communicator_; }
  const Pointer& pointer() const { return communicator_; }

 private:
  Pointer communicator_;
};

// What a thread has asked for since ncclGroupStart.
struct Open {
  int depth = 0;
  std::vector<Pointer> with_work;
  std::vector<Pointer> connecting;
};
thread_local Open open;

void remember(std::vector<Pointer>& all, const Pointer& communicator) {
  for (const Pointer& known : all) {
    if (known == communicator) return;
  }
  all.push_back(communicator);
}

ncclResult_t worse(ncclResult_t a, ncclResult_t b) {
  if (a != ncclSuccess && a != ncclInProgress) return a;
  return b == ncclSuccess ? a : b;
}

ncclResult_t end_group() {
  ncclResult_t result = ncclSuccess;
  for (const Pointer& comm : std::exchange(open.with_work, {})) {
    result = worse(result, comm->start_added());
  }
  for (const Pointer& comm : std::exchange(open.connecting, {})) {
    result = worse(result, comm->blocking() ? comm->wait() : ncclInProgress);
  }
  return result;
}

ncclResult_t invalid(const std::string& text) {
  set_last_error(text);
  return ncclInvalidArgument;
}

// ---- Checks of buffers

std::string place(int location) {
  if (location == kPageable) return "pageable host memory";
  if (location == kPinned) return "pinned host memory";
  return "memory of device " + std::to_string(location);
}

void check_buffer(const Communicator& comm, const std::string& call, const char* which,
                  const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const std::string what = call + "'s " + which;
  const int location = location_of(data);
  if (location != comm.device()) {
    report("nccl memory", what + " is " + place(location) + ", the communicator is device " +
                              std::to_string(comm.device()) + "'s");
  }
  if (bytes_left(data) < bytes) {
    report("nccl memory", what + " has " + std::to_string(bytes_left(data)) + " bytes, needs " +
                              std::to_string(bytes));
  }
}

void check_overlap(const std::string& call, const Part& part, bool in_place) {
  if (in_place || part.send_bytes == 0 || part.recv_bytes == 0) return;
  const char* const send = static_cast<const char*>(part.send);
  const char* const recv = static_cast<const char*>(part.recv);
  if (send + part.send_bytes <= recv || recv + part.recv_bytes <= send) return;
  report("nccl overlap", call + "'s buffers overlap, but not as in-place operations do");
}

bool is_in_place(const Communicator& comm, const Part& part) {
  const char* const send = static_cast<const char*>(part.send);
  const char* const recv = static_cast<const char*>(part.recv);
  const auto rank = static_cast<std::size_t>(comm.rank());
  if (part.what.kind == Kind::all_gather) return send == recv + rank * part.send_bytes;
  if (part.what.kind == Kind::reduce_scatter) return recv == send + rank * part.recv_bytes;
  return send == recv;
}

Stream* check_stream(const Communicator& comm, const std::string& call, cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) report("nccl stream", call + " in what is no stream");
  if (device_of(*stream) != comm.device()) {
    report("nccl stream", call + " in a stream of device " + std::to_string(device_of(*stream)) +
                              ", the communicator is device " + std::to_string(comm.device()) +
                              "'s");
  }
  return stream;
}

// ---- Operations

ncclResult_t check_arguments(const Communicator& comm, const Part& part) {
  const auto type = static_cast<ncclDataType_t>(part.what.type);
  if (part.what.type < 0 || part.what.type >= ncclNumTypes) return invalid("no such datatype");
  if (nccl_size(type) == 0) report("nccl", "8-bit floats are not simulated");
  if (part.what.op < 0) return invalid("no such operation");
  if (part.what.op >= ncclNumOps) report("nccl", "operations made by users are not simulated");
  const int root = part.peer >= 0 ? part.peer : part.what.root;
  if (root < 0 || root >= comm.ranks()) return invalid("no such root or peer");
  return ncclSuccess;
}

/// Sizes in elements; 0 where the rank has no such buffer.
ncclResult_t operate(const char* name, ncclComm_t handle, cudaStream_t stream, Part part,
                     std::size_t sent, std::size_t received) {
  if (handle == nullptr) return invalid("comm is NULL");
  const Use comm(handle, name);
  const Call call(name);
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  comm->check_usable(name);
  if (const ncclResult_t error = comm->poll(); error != ncclSuccess) return error;
  if (const ncclResult_t wrong = check_arguments(*comm, part); wrong != ncclSuccess) return wrong;
  if (part.what.count == 0) return ncclSuccess;
  const std::size_t size = nccl_size(static_cast<ncclDataType_t>(part.what.type));
  part.send_bytes = sent * size;
  part.recv_bytes = received * size;
  check_buffer(*comm, name, "sendbuff", part.send, part.send_bytes);
  check_buffer(*comm, name, "recvbuff", part.recv, part.recv_bytes);
  check_overlap(name, part, is_in_place(*comm, part));
  comm->add(part, check_stream(*comm, name, stream));
  remember(open.with_work, comm.pointer());
  return open.depth > 0 ? ncclSuccess : end_group();
}

Signature signature(Kind kind, std::size_t count, ncclDataType_t type, int op = 0, int root = 0) {
  return {kind, static_cast<std::int32_t>(type), op, root, count};
}

std::size_t ranks_of(ncclComm_t handle) {
  return handle == nullptr ? 0 : static_cast<std::size_t>(communicator_of(handle, "nccl")->ranks());
}

int rank_of(ncclComm_t handle) {
  return handle == nullptr ? 0 : communicator_of(handle, "nccl")->rank();
}

/// Of a communicator that several ids together name.
ncclResult_t init(const char* name, ncclComm_t* handle, int ranks, const ncclUniqueId* ids,
                  int id_count, int rank, const ncclConfig_t* config) {
  const Call call(name);
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (handle == nullptr) return invalid("comm is NULL");
  *handle = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks) return invalid("no such rank");
  if (config != nullptr && config->magic != 0xcafebeef) return invalid("config is not initialized");
  if (ids == nullptr || id_count < 1 || id_count > ranks)
    return invalid("expected 1 to nranks ids");
  for (int i = 0; i < id_count; ++i) {
    if (!Board::is_name(std::string(ids[i].internal, strnlen(ids[i].internal, sizeof *ids))))
      return invalid("id " + std::to_string(i) + " is not ncclGetUniqueId's");
  }
  const std::string_view bytes(ids->internal, sizeof *ids * static_cast<std::size_t>(id_count));
  const bool blocking = config == nullptr || config->blocking != 0;
  auto comm = std::make_shared<Communicator>(ids->internal, ranks, rank, current_device(), blocking,
                                             std::hash<std::string_view>{}(bytes));
  const ncclResult_t result = comm->join();
  if (result != ncclInProgress) return result;
  *handle = make_handle(comm);
  open.connecting.push_back(comm);
  return open.depth > 0 ? ncclSuccess : end_group();
}

template <class Answer>
ncclResult_t ask(const char* name, ncclComm_t handle, int* out, Answer&& answer) {
  if (handle == nullptr || out == nullptr) return invalid("comm or result is NULL");
  const auto comm = communicator_of(handle, name);
  const Call call(name);
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (comm->stage() == Communicator::Stage::connecting) comm->check_usable(name);
  *out = answer(*comm);
  return ncclSuccess;
}

/// A fault that a test has planted for one of the next polls.
ncclResult_t injected_async_error() {
  const Call call("ncclAsyncError");
  return static_cast<ncclResult_t>(call.injected());
}

}  // namespace
}  // namespace cairn::gpusim

using namespace cairn::gpusim;

ncclResult_t ncclGetVersion(int* version) {
  const Call call("ncclGetVersion");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (version == nullptr) return invalid("version is NULL");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Call call("ncclGetUniqueId");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (id == nullptr) return invalid("uniqueId is NULL");
  const std::string name = Board::new_name();
  std::memset(id->internal, 0, sizeof id->internal);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return init("ncclCommInitRank", comm, nranks, &id, 1, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return init("ncclCommInitRankConfig", comm, nranks, &id, 1, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int nId,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
  return init("ncclCommInitRankScalable", comm, nranks, ids, nId, rank, config);
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (handle == nullptr) return invalid("comm is NULL");
  const Use comm(handle, "ncclCommFinalize");
  const Call call("ncclCommFinalize");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  comm->check_usable(call.name());
  return comm->finalize();
}

/// Of one that is not finalized it does that first, and blocks even where others do not.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  const Use comm(handle, "ncclCommDestroy");
  const Call call("ncclCommDestroy");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (comm->stage() != Communicator::Stage::finalized) {
    comm->check_usable(call.name());
    if (comm->pending() > 0) {
      report("nccl destroy", "ncclCommDestroy with " + std::to_string(comm->pending()) +
                                 " operations pending (ncclCommFinalize comes first)");
    }
    comm->finalize();
    if (const ncclResult_t result = comm->wait(); result != ncclSuccess) return result;
  }
  comm->end();
  return ncclSuccess;
}

/// May come while another thread waits inside of a call.
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  const Pointer comm = communicator_of(handle, "ncclCommAbort");
  const Call call("ncclCommAbort");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  comm->abort();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  if (handle == nullptr || error == nullptr) return invalid("comm or asyncError is NULL");
  const Use comm(handle, "ncclCommGetAsyncError");
  const ncclResult_t planted = injected_async_error();
  const Call call("ncclCommGetAsyncError");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  if (planted != ncclSuccess) comm->fail(planted);
  *error = comm->poll();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask("ncclCommCount", comm, count, [](const Communicator& c) { return c.ranks(); });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask("ncclCommUserRank", comm, rank, [](const Communicator& c) { return c.rank(); });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask("ncclCommCuDevice", comm, device, [](const Communicator& c) { return c.device(); });
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  if (handle == nullptr || child == nullptr) return invalid("comm or newcomm is NULL");
  const Use comm(handle, "ncclCommSplit");
  const Call call("ncclCommSplit");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  comm->check_usable(call.name());
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return invalid("no such color");
  if (comm->pending() > 0) {
    report("nccl split", "ncclCommSplit with " + std::to_string(comm->pending()) +
                             " operations pending, which may wait for ranks that are in it");
  }
  const bool inherits = config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT;
  return comm->split(color, key, child, inherits ? comm->blocking() : config->blocking != 0);
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* data, size_t bytes, void** out) {
  if (handle == nullptr || out == nullptr) return invalid("comm or handle is NULL");
  const Use comm(handle, "ncclCommRegister");
  const Call call("ncclCommRegister");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  check_buffer(*comm, call.name(), "buffer", data, bytes);
  *out = data;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registered) {
  if (handle == nullptr) return invalid("comm is NULL");
  const Use comm(handle, "ncclCommDeregister");
  const Call call("ncclCommDeregister");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  return registered == nullptr ? invalid("handle is NULL") : ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  return last_error();
}

ncclResult_t ncclGroupStart() {
  const Call call("ncclGroupStart");
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  ++open.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Call call("ncclGroupEnd");
  if (open.depth == 0) {
    set_last_error("ncclGroupEnd: not in a group call");
    return ncclInvalidUsage;
  }
  --open.depth;
  if (call.injected() != 0) return static_cast<ncclResult_t>(call.injected());
  return open.depth > 0 ? ncclSuccess : end_group();
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclAllReduce", comm, stream,
                 {signature(Kind::all_reduce, count, type, op), -1, send, recv}, count, count);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclBroadcast", comm, stream,
                 {signature(Kind::broadcast, count, type, 0, root), -1, send, recv},
                 rank_of(comm) == root ? count : 0, count);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclReduce", comm, stream,
                 {signature(Kind::reduce, count, type, op, root), -1, send, recv}, count,
                 rank_of(comm) == root ? count : 0);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclAllGather", comm, stream,
                 {signature(Kind::all_gather, count, type), -1, send, recv}, count,
                 count * ranks_of(comm));
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclReduceScatter", comm, stream,
                 {signature(Kind::reduce_scatter, count, type, op), -1, send, recv},
                 count * ranks_of(comm), count);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclSend", comm, stream,
                 {signature(Kind::send, count, type), peer, send, nullptr}, count, 0);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return operate("ncclRecv", comm, stream,
                 {signature(Kind::recv, count, type), peer, nullptr, recv}, 0, count);
}
