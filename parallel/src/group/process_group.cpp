#include "cairn/parallel/process_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/tensor.h"
#include "collectives/combine.h"
#include "group/group_impl.h"
#include "group/job_environment.h"

namespace cairn::parallel {
namespace {

std::string quoted(std::string_view name) {
  return name.empty() ? std::string() : core::str(" '", name, "'");
}

/// "all_reduce sum f32[3, 4] 'fc.weight'": what the ranks compare.
std::string describe(const char* operation, std::string_view detail, const TensorView& x,
                     std::string_view name) {
  return core::str(operation, " ", detail, detail.empty() ? "" : " ", x.dtype, x.shape,
                   quoted(name));
}

void check_dense(const char* operation, const TensorView& x, std::string_view name) {
  CAIRN_CHECK(x.is_dense(), operation, "expected a dense view", quoted(name), ", got shape ",
              x.shape, " with strides ", x.strides);
}

/// Checks whole [parts * n] against part [n].
void check_parts(const char* operation, const TensorView& whole, const TensorView& part, int parts,
                 std::string_view name) {
  CAIRN_CHECK(whole.is_contiguous() && part.is_contiguous(), operation, "expected contiguous views",
              quoted(name), ", got strides ", whole.strides, " and ", part.strides);
  CAIRN_CHECK(whole.dtype == part.dtype && whole.device == part.device, operation,
              "expected one dtype and device", quoted(name), ", got ", whole.dtype, " on ",
              whole.device, " and ", part.dtype, " on ", part.device);
  CAIRN_CHECK(whole.numel() == parts * part.numel(), operation, "expected ", parts, " parts of ",
              part.numel(), " elements", quoted(name), ", got ", whole.numel(), " elements in ",
              whole.shape);
}

std::string bytes_of(double value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

double double_of(const std::string& bytes) {
  double value = 0;
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

}  // namespace

ProcessGroup ProcessGroup::single() {
  return ProcessGroup(std::make_shared<Impl>(JobEnvironment{}, GroupOptions{}));
}

ProcessGroup ProcessGroup::from_environment(const GroupOptions& options) {
  const JobEnvironment job = read_job_environment();
  auto impl = std::make_shared<Impl>(job, options);
  if (job.world_size > 1) {
    impl->join([&](OnFailure on_failure, CheckDevices check) {
      return join_processes(job, options, std::move(on_failure), std::move(check));
    });
  }
  return ProcessGroup(std::move(impl));
}

std::vector<ProcessGroup> ProcessGroup::in_process(int world_size, const GroupOptions& options) {
  CAIRN_CHECK(world_size >= 1, "in_process", "expected at least one rank, got ", world_size);
  const std::shared_ptr<InProcessGroup> shared = make_in_process_group(world_size);
  std::vector<ProcessGroup> groups;
  for (int rank = 0; rank < world_size; ++rank) {
    JobEnvironment job;
    job.rank = job.local_rank = rank;
    job.world_size = job.local_world_size = world_size;
    auto impl = std::make_shared<Impl>(job, options);
    if (world_size > 1)
      impl->join([&](OnFailure on_failure, const CheckDevices&) {
        return join_in_process_group(shared, rank, std::move(on_failure));
      });
    groups.push_back(ProcessGroup(std::move(impl)));
  }
  return groups;
}

int ProcessGroup::rank() const {
  return impl_->job().rank;
}
int ProcessGroup::world_size() const {
  return impl_->job().world_size;
}
int ProcessGroup::local_rank() const {
  return impl_->job().local_rank;
}
int ProcessGroup::local_world_size() const {
  return impl_->job().local_world_size;
}

Device ProcessGroup::device(std::string_view text) const {
  const int gpus = core::device_count(core::DeviceType::cuda);
  if (text.empty()) text = gpus >= local_world_size() ? "cuda" : "cpu";
  if (text != "cuda") return Device::parse(text);
  const Device device{core::DeviceType::cuda, local_rank()};
  CAIRN_CHECK(gpus == 0 || local_rank() < gpus, "device", "expected a GPU for each of the ",
              local_world_size(), " processes of this machine, got ", gpus,
              " (start fewer, or train on cpu)");
  core::check_exists(device);
  return device;
}

void ProcessGroup::all_reduce(const TensorView& x, ReduceOp op, std::string_view name) const {
  check_dense("all_reduce", x, name);
  check_reducible("all_reduce", op, x.dtype);
  impl_->run("all_reduce", describe("all_reduce", parallel::name(op), x, name), x.device,
             [x, op](Collectives& backend) { backend.all_reduce(x, op); });
}

void ProcessGroup::broadcast(const TensorView& x, int root, std::string_view name) const {
  check_dense("broadcast", x, name);
  CAIRN_CHECK(root >= 0 && root < world_size(), "broadcast", "expected a root from 0 to ",
              world_size() - 1, ", got ", root);
  impl_->run("broadcast", describe("broadcast", core::str("from ", root), x, name), x.device,
             [x, root](Collectives& backend) { backend.broadcast(x, root); });
}

void ProcessGroup::all_gather(const TensorView& x, const TensorView& y,
                              std::string_view name) const {
  check_parts("all_gather", y, x, world_size(), name);
  if (world_size() == 1) return core::copy_bytes(x, TensorView(y.data, x.shape, y.dtype, y.device));
  impl_->run("all_gather", describe("all_gather", "", x, name), x.device,
             [x, y](Collectives& backend) { backend.all_gather(x, y); });
}

void ProcessGroup::reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op,
                                  std::string_view name) const {
  check_parts("reduce_scatter", x, y, world_size(), name);
  check_reducible("reduce_scatter", op, x.dtype);
  if (world_size() == 1) return core::copy_bytes(x, TensorView(y.data, x.shape, y.dtype, y.device));
  impl_->run("reduce_scatter", describe("reduce_scatter", parallel::name(op), x, name), x.device,
             [x, y, op](Collectives& backend) { backend.reduce_scatter(x, y, op); });
}

void ProcessGroup::barrier(std::string_view name) const {
  barrier(impl_->options().timeout, name);
}

void ProcessGroup::barrier(std::chrono::milliseconds timeout, std::string_view name) const {
  impl_->exchange("barrier", core::str("barrier", quoted(name)), "", timeout);
}

std::vector<std::string> ProcessGroup::exchange(const std::string& value,
                                                std::string_view name) const {
  return impl_->exchange("exchange", core::str("exchange", quoted(name)), value,
                         impl_->options().timeout);
}

double ProcessGroup::all_reduce_max(double value, std::string_view name) const {
  double result = value;
  for (const std::string& bytes : exchange(bytes_of(value), name)) {
    const double other = double_of(bytes);
    if (other > result || other != other) result = other;
  }
  return result;
}

double ProcessGroup::all_reduce_sum(double value, std::string_view name) const {
  double sum = 0;
  for (const std::string& bytes : exchange(bytes_of(value), name)) sum += double_of(bytes);
  return sum;
}

core::World ProcessGroup::world() const {
  return {rank(), world_size(), [group = *this](const std::string& value, std::string_view name) {
            return group.exchange(value, name);
          }};
}

void ProcessGroup::wait() const {
  impl_->wait();
}

void ProcessGroup::check() const {
  impl_->check();
}

void ProcessGroup::abort(std::string_view reason) const {
  impl_->abort(core::str("rank ", rank(), " gave up: ", reason));
}

}  // namespace cairn::parallel
