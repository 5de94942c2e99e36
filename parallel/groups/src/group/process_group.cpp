#include "cairn/parallel/process_group.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "cairn/core/status.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "collectives/cpu/combine.h"
#include "group/group_impl.h"
#include "group/job_environment.h"
#include "group/last_words.h"
#include "group/library_versions.h"
#include "group/meet_over_nccl.h"
#include "store/descriptors.h"

namespace cairn::parallel {
namespace {

std::string quoted(std::string_view name) {
  return name.empty() ? std::string() : core::str(" '", name, "'");
}

void check_dense(const char* operation, const TensorView& x, std::string_view name) {
  CAIRN_CHECK(x.is_dense(), operation, "expected a dense view", quoted(name), ", got shape ",
              x.shape, " with strides ", x.strides);
}

Counts even_counts(const TensorView& part, int world) {
  return Counts(static_cast<std::size_t>(world), part.numel());
}

/// "all_gather f32 parts [3, 0, 5] 'tokens'"; long lists are told by their sum and hash.
Description describe_parts(const char* operation, const std::string& detail, DType dtype,
                           const Counts& counts, std::string_view name) {
  constexpr std::size_t kMostListed = 16;
  std::string parts;
  std::int64_t elements = 0;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::int64_t count : counts) {
    parts += core::str(parts.empty() ? "" : ", ", count);
    hash = (hash ^ static_cast<std::uint64_t>(count)) * 0x100000001b3u;
    elements += count;
  }
  if (counts.size() > kMostListed)
    parts = core::str(counts.size(), " parts, the first of ", counts.front(), ", hash ", hash);
  return {core::str(operation, " ", detail, detail.empty() ? "" : " ", dtype, " parts [", parts,
                    "]", quoted(name)),
          elements * static_cast<std::int64_t>(core::size_of(dtype))};
}

/// The same with what moves, of parts of so many elements; `own` is what every rank gives.
Description describe_parts(const char* operation, const std::string& detail, const TensorView& own,
                           const TensorView& in, const TensorView& out, const Counts& counts,
                           std::string_view name) {
  MovedSizes moved = moved_sizes(own, in, out);
  Description what = describe_parts(operation, detail, moved.dtype, counts, name);
  moved.uneven = !std::equal(counts.begin() + 1, counts.end(), counts.begin());
  if (moved.uneven)
    moved.in = moved.out = {std::accumulate(counts.begin(), counts.end(), std::int64_t{0})};
  return what.moving(moved);
}

void check_root(const char* operation, int root, int world) {
  CAIRN_CHECK(root >= 0 && root < world, operation, "expected a root from 0 to ", world - 1,
              ", got ", root);
}

Counts checked_counts(const char* operation, std::span<const std::int64_t> counts, int world,
                      std::string_view name) {
  CAIRN_CHECK(counts.size() == static_cast<std::size_t>(world), operation, "expected ", world,
              " counts, one a rank", quoted(name), ", got ", counts.size());
  for (const std::int64_t count : counts)
    CAIRN_CHECK(count >= 0, operation, "expected counts of 0 or more", quoted(name), ", got ",
                count);
  return {counts.begin(), counts.end()};
}

bool overlap(const TensorView& a, const TensorView& b) {
  const auto* x = static_cast<const std::byte*>(a.data);
  const auto* y = static_cast<const std::byte*>(b.data);
  return a.nbytes() > 0 && b.nbytes() > 0 && x < y + b.nbytes() && y < x + a.nbytes();
}

void check_alike(const char* operation, const TensorView& x, const TensorView& y,
                 std::string_view name) {
  CAIRN_CHECK(x.is_contiguous() && y.is_contiguous(), operation, "expected contiguous views",
              quoted(name), ", got strides ", x.strides, " and ", y.strides);
  CAIRN_CHECK(x.dtype == y.dtype && x.device == y.device, operation,
              "expected one dtype and device", quoted(name), ", got ", x.dtype, " on ", x.device,
              " and ", y.dtype, " on ", y.device);
}

void check_total(const char* operation, const TensorView& whole, const Counts& counts,
                 std::string_view name) {
  std::int64_t rest = whole.numel();
  for (const std::int64_t count : counts) rest = rest < count ? -1 : rest - count;
  if (rest == 0) return;
  const bool even = std::equal(counts.begin() + 1, counts.end(), counts.begin());
  core::fail(operation, "expected ", counts.size(), " parts ",
             even ? core::str("of ", counts.front(), " elements") : "that make up the whole",
             quoted(name), ", got ", whole.numel(), " elements in ", whole.shape);
}

void check_count(const char* operation, const TensorView& part, const Counts& counts, int rank,
                 std::string_view name) {
  const std::int64_t count = counts[static_cast<std::size_t>(rank)];
  CAIRN_CHECK(part.is_contiguous(), operation, "expected contiguous views", quoted(name),
              ", got strides ", part.strides);
  CAIRN_CHECK(part.numel() == count, operation, "expected ", count, " elements on rank ", rank,
              quoted(name), ", got ", part.numel(), " in ", part.shape);
}

/// Checks whole [sum of counts] against part [counts[rank]], which may lie at its own place in it.
void check_parts(const char* operation, const TensorView& whole, const TensorView& part,
                 const Counts& counts, int rank, std::string_view name) {
  check_alike(operation, whole, part, name);
  check_count(operation, part, counts, rank, name);
  check_total(operation, whole, counts, name);
  std::int64_t before = 0;
  for (int r = 0; r < rank; ++r) before += counts[static_cast<std::size_t>(r)];
  const auto* place = static_cast<const std::byte*>(whole.data) +
                      static_cast<std::size_t>(before) * core::size_of(whole.dtype);
  CAIRN_CHECK(part.data == place || !overlap(whole, part), operation,
              "expected views that do not overlap", quoted(name),
              ", but for this rank's part in its place");
}

void check_pair(const char* operation, const TensorView& x, int peer, const ProcessGroup& group,
                std::string_view name) {
  check_dense(operation, x, name);
  CAIRN_CHECK(peer >= 0 && peer < group.world_size() && peer != group.rank(), operation,
              "expected another rank of the ", group.world_size(), quoted(name), ", got rank ",
              peer, " on rank ", group.rank());
}

/// A group of one has what it needs.
void copy_own(const TensorView& x, const TensorView& y) {
  if (x.data == y.data || x.numel() == 0) return;
  core::copy_bytes(TensorView(x.data, {x.numel()}, x.dtype, x.device),
                   TensorView(y.data, {y.numel()}, y.dtype, y.device));
}

void override(std::chrono::milliseconds& limit, const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  CAIRN_CHECK(end != text && *end == '\0' && seconds > 0.0 && seconds < 1e9, "from_environment",
              "expected ", name, " to be a number of seconds, got '", text, "'");
  limit = std::chrono::milliseconds(std::llround(seconds * 1000.0));
}

GroupOptions with_environment(GroupOptions options) {
  override(options.timeout, "CAIRN_TIMEOUT");
  override(options.heartbeat_timeout, "CAIRN_HEARTBEAT_TIMEOUT");
  override(options.rendezvous_timeout, "CAIRN_RENDEZVOUS_TIMEOUT");
  return options;
}

std::shared_ptr<ProcessGroup::Impl> join_job(const JobEnvironment& job, const GroupOptions& options,
                                             std::unique_ptr<StoreServer> server) {
  const bool alone = job.world_size == 1;
  core::tell_job(alone ? "" : core::str(job.master_addr, ":", job.master_port), job.rank,
                 job.world_size);
  if (!alone) make_room_for_connections(job.rank == 0 ? job.world_size : 1);
  auto impl = std::make_shared<ProcessGroup::Impl>(
      job, options, [&](OnFailure on_failure, CheckDevices check) {
        return join_processes(job, options, std::move(on_failure), std::move(check),
                              StoreClient::kAnswerTime, std::move(server));
      });
  if (!alone) {
    tell_of_terminate(impl->job());
    FlightRecorder::watch_signal();
  }
  return impl;
}

}  // namespace

ProcessGroup ProcessGroup::single() {
  return ProcessGroup(std::make_shared<Impl>(JobEnvironment{}, GroupOptions{}));
}

ProcessGroup ProcessGroup::from_environment(const GroupOptions& given) {
  const JobEnvironment job = read_job_environment();
  const GroupOptions options = with_environment(given);
  const core::WaitMark meeting("meeting the other ranks");
  return ProcessGroup(join_job(job, options, nullptr));
}

ProcessGroup ProcessGroup::from_nccl(ncclComm* communicator, const GroupOptions& given) {
  const GroupOptions options = with_environment(given);
  const core::WaitMark meeting("meeting the other ranks");
  auto [job, server] = meet_over_nccl(communicator, options.rendezvous_timeout);
  return ProcessGroup(join_job(job, options, std::move(server)));
}

std::vector<ProcessGroup> ProcessGroup::in_process(int world_size, const GroupOptions& options) {
  CAIRN_CHECK(world_size >= 1, "in_process", "expected at least one rank, got ", world_size);
  const std::shared_ptr<InProcessGroup> shared = make_in_process_group(world_size);
  std::vector<ProcessGroup> groups;
  for (int rank = 0; rank < world_size; ++rank) {
    JobEnvironment job;
    job.rank = job.local_rank = rank;
    job.world_size = job.local_world_size = world_size;
    const auto join = [&](OnFailure on_failure, CheckDevices check) {
      return join_in_process_group(shared, rank, options, std::move(on_failure), std::move(check));
    };
    groups.push_back(ProcessGroup(std::make_shared<Impl>(job, options, join)));
  }
  return groups;
}

ProcessGroup ProcessGroup::split(int color, int key, std::string_view name) const {
  return ProcessGroup(impl_->split(color, key, core::str("split", quoted(name))));
}

int ProcessGroup::rank() const {
  return impl_->rank();
}
int ProcessGroup::world_size() const {
  return impl_->world_size();
}
int ProcessGroup::local_rank() const {
  return impl_->local_rank();
}
int ProcessGroup::local_world_size() const {
  return impl_->local_world_size();
}

Device ProcessGroup::device(std::string_view text) const {
  const int gpus = core::device_count(core::DeviceType::cuda);
  const int own = impl_->job()->environment.gpu;
  if (text.empty()) text = own >= 0 || gpus >= local_world_size() ? "cuda" : "cpu";
  if (text != "cuda") return Device::parse(text);
  const Device device{core::DeviceType::cuda, own < 0 ? local_rank() : own};
  CAIRN_CHECK(gpus == 0 || device.index < gpus, "device", "expected a GPU for each of the ",
              local_world_size(), " processes of this machine, got ", gpus,
              " (start fewer, or train on cpu)");
  core::check_exists(device);
  return device;
}

void ProcessGroup::all_reduce(const TensorView& x, ReduceOp op, std::string_view name) const {
  check_dense("all_reduce", x, name);
  check_reducible("all_reduce", op, x.dtype);
  impl_->run("all_reduce", {"all_reduce", parallel::name(op), -1, x, name}, x.device,
             [x, op](Collectives& backend) { backend.all_reduce(x, op); });
}

void ProcessGroup::reduce(const TensorView& x, const TensorView& y, int root, ReduceOp op,
                          std::string_view name) const {
  check_root("reduce", root, world_size());
  check_reducible("reduce", op, x.dtype);
  CAIRN_CHECK(x.is_contiguous(), "reduce", "expected contiguous views", quoted(name),
              ", got strides ", x.strides);
  if (rank() == root) {
    check_alike("reduce", x, y, name);
    CAIRN_CHECK(x.numel() == y.numel(), "reduce", "expected as many elements in y as in x",
                quoted(name), ", got ", y.numel(), " in ", y.shape, " and ", x.numel(), " in ",
                x.shape);
    CAIRN_CHECK(x.data == y.data || !overlap(x, y), "reduce",
                "expected y to be x or not to overlap it", quoted(name));
  }
  if (world_size() == 1) return copy_own(x, y);
  Description what =
      core::str("reduce ", parallel::name(op), " to ", root, " ", x.dtype, x.shape, quoted(name));
  impl_->run("reduce", what.moving(moved_sizes(x, x, x)), x.device,
             [x, y, op, root](Collectives& backend) { backend.reduce(x, y, op, root); });
}

void ProcessGroup::broadcast(const TensorView& x, int root, std::string_view name) const {
  check_dense("broadcast", x, name);
  check_root("broadcast", root, world_size());
  impl_->run("broadcast", {"broadcast", "from", root, x, name}, x.device,
             [x, root](Collectives& backend) { backend.broadcast(x, root); });
}

void ProcessGroup::all_gather(const TensorView& x, const TensorView& y,
                              std::string_view name) const {
  all_gather(x, y, even_counts(x, world_size()), name);
}

void ProcessGroup::all_gather(const TensorView& x, const TensorView& y,
                              std::span<const std::int64_t> counts, std::string_view name) const {
  const Counts all = checked_counts("all_gather", counts, world_size(), name);
  check_parts("all_gather", y, x, all, rank(), name);
  if (world_size() == 1) return copy_own(x, y);
  impl_->run("all_gather", describe_parts("all_gather", "", x, x, y, all, name), x.device,
             [x, y, all](Collectives& backend) { backend.all_gather(x, y, all); });
}

void ProcessGroup::gather(const TensorView& x, const TensorView& y, int root,
                          std::string_view name) const {
  gather(x, y, even_counts(x, world_size()), root, name);
}

void ProcessGroup::gather(const TensorView& x, const TensorView& y,
                          std::span<const std::int64_t> counts, int root,
                          std::string_view name) const {
  check_root("gather", root, world_size());
  const Counts all = checked_counts("gather", counts, world_size(), name);
  check_count("gather", x, all, rank(), name);
  if (rank() == root) check_parts("gather", y, x, all, rank(), name);
  if (world_size() == 1) return copy_own(x, y);
  const Description what = describe_parts("gather", core::str("to ", root), x, x, y, all, name);
  impl_->run("gather", what, x.device,
             [x, y, all, root](Collectives& backend) { backend.gather(x, y, all, root); });
}

void ProcessGroup::scatter(const TensorView& x, const TensorView& y, int root,
                           std::string_view name) const {
  scatter(x, y, even_counts(y, world_size()), root, name);
}

void ProcessGroup::scatter(const TensorView& x, const TensorView& y,
                           std::span<const std::int64_t> counts, int root,
                           std::string_view name) const {
  check_root("scatter", root, world_size());
  const Counts all = checked_counts("scatter", counts, world_size(), name);
  check_count("scatter", y, all, rank(), name);
  if (rank() == root) check_parts("scatter", x, y, all, rank(), name);
  if (world_size() == 1) return copy_own(x, y);
  const Description what = describe_parts("scatter", core::str("from ", root), y, x, y, all, name);
  impl_->run("scatter", what, y.device,
             [x, y, all, root](Collectives& backend) { backend.scatter(x, y, all, root); });
}

void ProcessGroup::reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op,
                                  std::string_view name) const {
  reduce_scatter(x, y, even_counts(y, world_size()), op, name);
}

void ProcessGroup::reduce_scatter(const TensorView& x, const TensorView& y,
                                  std::span<const std::int64_t> counts, ReduceOp op,
                                  std::string_view name) const {
  const Counts all = checked_counts("reduce_scatter", counts, world_size(), name);
  check_parts("reduce_scatter", x, y, all, rank(), name);
  check_reducible("reduce_scatter", op, x.dtype);
  if (world_size() == 1) return copy_own(x, y);
  const std::string detail(parallel::name(op));
  impl_->run("reduce_scatter", describe_parts("reduce_scatter", detail, x, x, y, all, name),
             x.device,
             [x, y, all, op](Collectives& backend) { backend.reduce_scatter(x, y, all, op); });
}

void ProcessGroup::all_to_all(const TensorView& x, const TensorView& y,
                              std::string_view name) const {
  check_alike("all_to_all", x, y, name);
  CAIRN_CHECK(x.numel() == y.numel() && x.numel() % world_size() == 0, "all_to_all", "expected ",
              world_size(), " parts of one size in x and y", quoted(name), ", got ", x.shape,
              " and ", y.shape);
  CAIRN_CHECK(!overlap(x, y), "all_to_all", "expected views that do not overlap", quoted(name));
  if (world_size() == 1) return copy_own(x, y);
  const Counts counts(static_cast<std::size_t>(world_size()), x.numel() / world_size());
  const Description what = describe_parts("all_to_all", "", x, x, y, counts, name);
  impl_->run("all_to_all", what, x.device, [x, y, counts](Collectives& backend) {
    backend.all_to_all(x, counts, y, counts, true);
  });
}

void ProcessGroup::all_to_all(const TensorView& x, std::span<const std::int64_t> send_counts,
                              const TensorView& y, std::span<const std::int64_t> receive_counts,
                              std::string_view name) const {
  const Counts out = checked_counts("all_to_all", send_counts, world_size(), name);
  const Counts in = checked_counts("all_to_all", receive_counts, world_size(), name);
  check_alike("all_to_all", x, y, name);
  check_total("all_to_all", x, out, name);
  check_total("all_to_all", y, in, name);
  const auto me = static_cast<std::size_t>(rank());
  CAIRN_CHECK(out[me] == in[me], "all_to_all", "expected one count for what rank ", rank(),
              " sends itself", quoted(name), ", got ", out[me], " to send and ", in[me],
              " to receive");
  CAIRN_CHECK(!overlap(x, y), "all_to_all", "expected views that do not overlap", quoted(name));
  if (world_size() == 1) return copy_own(x, y);
  Description what = core::str("all_to_all ", x.dtype, " of uneven parts", quoted(name));
  impl_->run("all_to_all", what.moving(moved_sizes(x, x, y)), x.device,
             [x, y, out, in](Collectives& backend) { backend.all_to_all(x, out, y, in, false); });
}

void ProcessGroup::barrier(std::string_view name) const {
  const core::StreamGuard here(core::Stream::default_stream(Device{}));
  barrier(impl_->options().timeout, name);
}

void ProcessGroup::send(const TensorView& x, int to, std::uint64_t tag,
                        std::string_view name) const {
  check_pair("send", x, to, *this, name);
  const std::string what =
      core::str("send to ", to, " tag ", tag, " ", x.dtype, x.shape, quoted(name));
  impl_->run_pair({"send", true, to, x, tag}, what);
}

void ProcessGroup::recv(const TensorView& x, int from, std::uint64_t tag,
                        std::string_view name) const {
  check_pair("recv", x, from, *this, name);
  const std::string what =
      core::str("recv from ", from, " tag ", tag, " ", x.dtype, x.shape, quoted(name));
  impl_->run_pair({"recv", false, from, x, tag}, what);
}

void ProcessGroup::barrier(std::chrono::milliseconds timeout, std::string_view name) const {
  impl_->run_now("barrier", core::str("barrier", quoted(name)), timeout,
                 [](Collectives& backend) { backend.barrier(); });
}

std::vector<std::string> ProcessGroup::exchange(const std::string& value,
                                                std::string_view name) const {
  return impl_->exchange("exchange", core::str("exchange", quoted(name)), value,
                         impl_->options().timeout);
}

double ProcessGroup::all_reduce_max(double value, std::string_view name) const {
  double result = value;
  for (const std::string& told : exchange(core::Packer().real(value).bytes(), name)) {
    const double other = core::Unpacker(told).real();
    if (other > result || other != other) result = other;
  }
  return result;
}

double ProcessGroup::all_reduce_sum(double value, std::string_view name) const {
  return world().sum(value, name);
}

namespace {

class GroupLink final : public core::WorldLink {
 public:
  GroupLink(ProcessGroup group, std::vector<int> job_ranks)
      : group_(std::move(group)), job_ranks_(std::move(job_ranks)) {}
  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    return group_.exchange(value, name);
  }
  core::LibraryVersions libraries() const override { return library_versions(); }
  std::vector<int> job_ranks() const override { return job_ranks_; }

 private:
  ProcessGroup group_;
  std::vector<int> job_ranks_;
};

}  // namespace

core::World ProcessGroup::world() const {
  return {rank(), world_size(), std::make_shared<GroupLink>(*this, impl_->job_ranks())};
}

struct Work::Impl {
  std::shared_ptr<ProcessGroup::Impl> group;
  core::Event end;
};

bool Work::done() const {
  return impl_->end.done();
}

void Work::wait() const {
  const core::WaitMark mark("waiting for a collective");
  impl_->end.synchronize();
  if (impl_->end.device().is_cuda()) impl_->group->wait();
  impl_->group->check();
}

bool Work::wait_for(std::chrono::milliseconds timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  auto pause = std::chrono::microseconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
  wait();
  return true;
}

std::string Work::error() const {
  return impl_->group->failure();
}

Work ProcessGroup::async(Device device, const std::function<void()>& calls) const {
  const core::Stream stream = impl_->stream(device);
  core::Event before(device), after(device);
  before.record(core::Stream::current(device));
  stream.wait(before);
  {
    const core::StreamGuard guard(stream);
    calls();
  }
  after.record(stream);
  return Work(std::make_shared<Work::Impl>(Work::Impl{impl_, after}));
}

core::Stream ProcessGroup::stream(Device device) const {
  return impl_->stream(device);
}

void ProcessGroup::wait() const {
  impl_->wait();
}

void ProcessGroup::check() const {
  impl_->check();
}

void ProcessGroup::give_up(std::string_view reason) const {
  impl_->give_up(std::string(reason));
}

void ProcessGroup::tell_of_exception() const noexcept {
  try {
    impl_->tell_of_exception(words_on_exception());
  } catch (const std::exception&) {  // they hear that it has left
  }
}

void ProcessGroup::abort(std::string_view reason) const {
  impl_->abort(core::str("rank ", rank(), " gave up: ", reason));
}

}  // namespace cairn::parallel
