#include "cairn/parallel/distributed.h"

#include <algorithm>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "ddp/bucket_plan.h"
#include "ddp/local_checks.h"
#include "ddp/model_sync.h"

namespace cairn::parallel {
namespace {

using core::Event;
using core::Stream;
using core::StreamGuard;

constexpr std::size_t kMostNames = 5;  // in one error

void check(const DistributedOptions& options) {
  CAIRN_CHECK(options.first_bucket_bytes > 0 && options.bucket_bytes > 0, "ddp",
              "expected bucket sizes above 0, got ", options.first_bucket_bytes, " and ",
              options.bucket_bytes, " bytes");
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostNames); ++i)
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  return names.size() <= kMostNames ? text
                                    : core::str(text, " and ", names.size() - kMostNames, " more");
}

}  // namespace

struct DistributedDataParallel::Impl {
  Impl(nn::Module& model, ProcessGroup group, const DistributedOptions& options);

  /// Follows the arena where amp, an optimizer or the user has changed the parameters.
  void prepare();
  void plan();
  void on_ready(std::size_t parameter);
  void begin();
  void reduce_complete();
  void reduce(const PlannedBucket& bucket);
  void wait_for_streams() const;
  void finish();
  std::vector<std::string> unwritten() const;
  const Stream& stream_of(Device device);

  nn::Module* model;
  ProcessGroup group;
  DistributedOptions options;
  std::shared_ptr<optim::GradientArena> arena;
  std::uint64_t planned_generation = 0;
  std::vector<PlannedBucket> buckets;
  std::vector<std::size_t> bucket_of;  // by the arena's parameters
  std::vector<autograd::HookHandle> hooks;
  std::vector<Stream> streams;  // one a device
  LocalChecks local_checks;
  int no_sync_depth = 0;

  // The backward pass under way.
  bool active = false;
  std::vector<std::size_t> missing;  // gradients, by bucket
  std::size_t next = 0;              // the first bucket that is not reduced yet
};

DistributedDataParallel::Impl::Impl(nn::Module& m, ProcessGroup g, const DistributedOptions& o)
    : model(&m),
      group(std::move(g)),
      options(o),
      arena(optim::GradientArena::attach(m.parameters())) {
  plan();
  if (group.world_size() == 1) return;
  for (std::size_t i = 0; i < arena->parameters().size(); ++i) {
    hooks.push_back(autograd::on_gradient_ready(arena->parameters()[i].tensor,
                                                [this, i](const Tensor&) { on_ready(i); }));
  }
}

void DistributedDataParallel::Impl::plan() {
  buckets = plan_buckets(*arena, options);
  bucket_of.assign(arena->parameters().size(), 0);
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& slots = arena->buffers()[buckets[b].buffer].slots;
    for (std::size_t s = buckets[b].first_slot; s < buckets[b].last_slot; ++s)
      bucket_of[slots[s].parameter] = b;
  }
  planned_generation = arena->generation();
}

void DistributedDataParallel::Impl::prepare() {
  if (std::exchange(active, false)) wait_for_streams();  // a backward that ended with an error
  if (arena->stale()) arena->refresh();
  if (planned_generation != arena->generation()) plan();
}

void DistributedDataParallel::Impl::begin() {
  if (planned_generation != arena->generation()) plan();
  active = true;
  next = 0;
  local_checks.begin_pass();
  missing.clear();
  for (const PlannedBucket& bucket : buckets)
    missing.push_back(bucket.last_slot - bucket.first_slot);
  autograd::on_backward_end([this] { finish(); });
}

void DistributedDataParallel::Impl::on_ready(std::size_t parameter) {
  if (no_sync_depth > 0) return;
  if (!active) begin();
  --missing[bucket_of[parameter]];
  reduce_complete();
}

void DistributedDataParallel::Impl::reduce_complete() {
  while (next < buckets.size() && missing[next] == 0) reduce(buckets[next++]);
}

const Stream& DistributedDataParallel::Impl::stream_of(Device device) {
  const auto found = std::find_if(streams.begin(), streams.end(),
                                  [&](const Stream& s) { return s.device() == device; });
  if (found != streams.end()) return *found;
  return streams.emplace_back(Stream::create(device, "communication"));
}

void DistributedDataParallel::Impl::reduce(const PlannedBucket& bucket) {
  const Device device = bucket.gradients.device;
  const Stream& stream = stream_of(device);
  Event written(device);
  written.record(Stream::current(device));
  stream.wait(written);
  const StreamGuard guard(stream);
  if (options.check_local_gradients) local_checks.check(*arena, bucket);
  group.all_reduce(bucket.gradients, ReduceOp::average, bucket.name);
}

/// Parameters without a gradient, of this backward or an earlier one that was not reduced.
std::vector<std::string> DistributedDataParallel::Impl::unwritten() const {
  std::vector<std::string> names;
  for (std::size_t b = next; b < buckets.size(); ++b) {
    const auto& slots = arena->buffers()[buckets[b].buffer].slots;
    for (std::size_t s = buckets[b].first_slot; s < buckets[b].last_slot; ++s) {
      const auto& [name, tensor] = arena->parameters()[slots[s].parameter];
      if (!tensor.meta().grad_written) names.push_back(name);
    }
  }
  return names;
}

/// Work on the current streams comes after what has been reduced so far.
void DistributedDataParallel::Impl::wait_for_streams() const {
  for (const Stream& stream : streams) {
    Event reduced(stream.device());
    reduced.record(stream);
    Stream::current(stream.device()).wait(reduced);
  }
}

void DistributedDataParallel::Impl::finish() {
  active = false;
  const std::vector<std::string> unused = unwritten();
  if (!unused.empty() && !options.unused_as_zeros) {
    const std::string message =
        core::str("expected a gradient for every parameter, got none for ", join(unused),
                  " (freeze them with set_requires_grad(false), or set unused_as_zeros)");
    group.abort(message);
    core::fail("ddp", message);
  }
  for (; next < buckets.size(); ++next) {
    const PlannedBucket& bucket = buckets[next];
    arena->zero_unwritten(arena->buffers()[bucket.buffer], bucket.first_slot, bucket.last_slot);
    reduce(bucket);
  }
  wait_for_streams();
}

DistributedDataParallel::DistributedDataParallel(nn::Module& model, ProcessGroup group,
                                                 const DistributedOptions& options) {
  check(options);
  if (group.world_size() > 1) {
    check_same_model(model, group);
    broadcast_model(model, group);
  }
  impl_ = std::make_unique<Impl>(model, std::move(group), options);
}

DistributedDataParallel::~DistributedDataParallel() = default;
DistributedDataParallel::DistributedDataParallel(DistributedDataParallel&&) noexcept = default;
DistributedDataParallel& DistributedDataParallel::operator=(DistributedDataParallel&&) noexcept =
    default;

Tensor DistributedDataParallel::operator()(const Tensor& x) {
  impl_->prepare();
  return (*impl_->model)(x);
}

DistributedDataParallel::NoSync::NoSync(int* depth) : depth_(depth) {
  if (depth_ != nullptr) ++*depth_;
}
DistributedDataParallel::NoSync::NoSync(NoSync&& other) noexcept
    : depth_(std::exchange(other.depth_, nullptr)) {}
DistributedDataParallel::NoSync::~NoSync() {
  if (depth_ != nullptr) --*depth_;
}

DistributedDataParallel::NoSync DistributedDataParallel::no_sync(bool if_) {
  return NoSync(if_ ? &impl_->no_sync_depth : nullptr);
}

void DistributedDataParallel::sync_buffers() {
  if (impl_->group.world_size() > 1) broadcast_buffers(*impl_->model, impl_->group);
}

std::vector<optim::NonFinite> DistributedDataParallel::local_nonfinite() {
  return impl_->local_checks.take(*impl_->arena);
}

nn::Module& DistributedDataParallel::module() const {
  return *impl_->model;
}
const ProcessGroup& DistributedDataParallel::group() const {
  return impl_->group;
}

std::vector<DistributedDataParallel::Bucket> DistributedDataParallel::buckets() const {
  std::vector<Bucket> described;
  for (const PlannedBucket& planned : impl_->buckets) {
    Bucket bucket;
    const auto& slots = impl_->arena->buffers()[planned.buffer].slots;
    for (std::size_t s = planned.first_slot; s < planned.last_slot; ++s) {
      bucket.parameters.push_back(impl_->arena->parameters()[slots[s].parameter].name);
    }
    bucket.bytes = static_cast<std::int64_t>(planned.gradients.nbytes());
    bucket.dtype = planned.gradients.dtype;
    described.push_back(std::move(bucket));
  }
  return described;
}

StateDict DistributedDataParallel::state_dict() const {
  StateDict state;
  state.set("first_bucket_bytes", impl_->options.first_bucket_bytes);
  state.set("bucket_bytes", impl_->options.bucket_bytes);
  state.set("buckets", static_cast<std::int64_t>(impl_->buckets.size()));
  return state;
}

void DistributedDataParallel::load_state_dict(const StateDict& state) {
  DistributedOptions options = impl_->options;
  options.first_bucket_bytes = state.integer("first_bucket_bytes");
  options.bucket_bytes = state.integer("bucket_bytes");
  check(options);
  impl_->options = options;
  impl_->plan();
}

}  // namespace cairn::parallel
