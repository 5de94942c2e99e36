#include "cairn/parallel/distributed.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
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

struct DistributedDataParallel::Impl final : core::GradientReducer {
  Impl(nn::Module& model, ProcessGroup group, const DistributedOptions& options);
  ~Impl() override;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void reduce(const std::vector<Part>& parts) override;
  void settle() override;

  /// Hooks and the reducer of every parameter, frozen ones too: they may be unfrozen.
  void connect(const std::shared_ptr<Impl>& self);
  /// Follows the arena where amp, an optimizer or the user has changed the parameters.
  void prepare();
  void plan();
  void on_ready(const void* parameter);
  void begin();
  void reduce_complete();
  void reduce(const PlannedBucket& bucket);
  void wait_for_streams() const;
  void finish();
  void synchronize(bool on);
  std::vector<std::string> unwritten() const;
  core::GradientSlot& slot_of(const PlannedBucket& bucket, std::size_t slot) const;
  const NamedTensor& parameter_of(const PlannedBucket& bucket, std::size_t slot) const;
  const Stream& stream_of(Device device);

  nn::Module* model;
  ProcessGroup group;
  DistributedOptions options;
  NamedTensors parameters;  // the model's
  std::shared_ptr<optim::GradientArena> arena;
  std::uint64_t planned_generation = 0;
  std::vector<PlannedBucket> buckets;
  std::unordered_map<const void*, std::size_t> bucket_of;  // by Tensor::id() of what trains
  std::vector<autograd::HookHandle> hooks;
  std::vector<Stream> streams;  // one a device
  LocalChecks local_checks;
  int no_sync_depth = 0;
  bool world_synchronizes = true;  // World::synchronize

  // The backward under way.
  core::RunId run = 0;               // 0: none
  std::vector<std::size_t> missing;  // gradients, by bucket
  std::size_t next = 0;              // the first bucket that is not reduced yet
};

DistributedDataParallel::Impl::Impl(nn::Module& m, ProcessGroup g, const DistributedOptions& o)
    : model(&m),
      group(std::move(g)),
      options(o),
      parameters(m.parameters()),
      arena(optim::GradientArena::attach(parameters)) {
  plan();
}

/// Gradients outlive the reducer that knows whether they are whole.
DistributedDataParallel::Impl::~Impl() {
  try {
    settle();
  } catch (const core::Error&) {  // their slots say so
  }
}

void DistributedDataParallel::Impl::connect(const std::shared_ptr<Impl>& self) {
  if (group.world_size() == 1) return;
  for (const auto& [name, tensor] : parameters) {
    tensor.gradient_slot().set_reducer(self);
    hooks.push_back(
        autograd::on_gradient_ready(tensor, [this](const Tensor& leaf) { on_ready(leaf.id()); }));
  }
}

void DistributedDataParallel::Impl::plan() {
  buckets = plan_buckets(*arena, parameters, options);
  bucket_of.clear();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t s = buckets[b].first_slot; s < buckets[b].last_slot; ++s) {
      bucket_of[parameter_of(buckets[b], s).tensor.id()] = b;
    }
  }
  planned_generation = arena->generation();
}

void DistributedDataParallel::Impl::prepare() {
  group.check();
  if (arena->stale()) arena->refresh();
  if (planned_generation == arena->generation()) return;
  // A parameter that was unfrozen or cast on some ranks only would be waited for without end.
  if (group.world_size() > 1) check_same_model(*model, group);
  plan();
}

void DistributedDataParallel::Impl::begin() {
  prepare();
  run = autograd::current_run();
  next = 0;
  local_checks.begin_pass();
  missing.clear();
  for (const PlannedBucket& bucket : buckets) {
    missing.push_back(bucket.last_slot - bucket.first_slot);
  }
  autograd::on_backward_end([this] { finish(); },
                            [this] {
                              run = 0;
                              wait_for_streams();  // before anybody writes there again
                            });
}

void DistributedDataParallel::Impl::on_ready(const void* parameter) {
  if (no_sync_depth > 0 || !world_synchronizes) return;
  if (run != autograd::current_run()) begin();
  const auto bucket = bucket_of.find(parameter);
  if (bucket == bucket_of.end()) return;
  --missing[bucket->second];
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

const NamedTensor& DistributedDataParallel::Impl::parameter_of(const PlannedBucket& bucket,
                                                               std::size_t slot) const {
  return arena->parameters()[arena->buffers()[bucket.buffer].slots[slot].parameter];
}

core::GradientSlot& DistributedDataParallel::Impl::slot_of(const PlannedBucket& bucket,
                                                           std::size_t slot) const {
  return parameter_of(bucket, slot).tensor.gradient_slot();
}

void DistributedDataParallel::Impl::reduce(const PlannedBucket& bucket) {
  const Device device = bucket.gradients.device;
  const Stream& stream = stream_of(device);
  Event written(device);
  written.record(Stream::current(device));
  stream.wait(written);
  const StreamGuard guard(stream);
  if (options.check_local_gradients) local_checks.check(*arena, bucket);
  group.all_reduce(bucket.gradients, ReduceOp::mean, bucket.name);
  for (std::size_t s = bucket.first_slot; s < bucket.last_slot; ++s)
    slot_of(bucket, s).mark_reduced();
}

/// What no backward has reduced by the time of a step or a stash.
void DistributedDataParallel::Impl::reduce(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    group.all_reduce(part.gradient, ReduceOp::mean, "gradient " + part.name);
  }
}

void DistributedDataParallel::Impl::settle() {
  try {
    group.wait();
  } catch (const core::CommunicationError& error) {
    for (const auto& [name, tensor] : parameters) tensor.gradient_slot().mark_broken(error.what());
    throw;
  }
}

/// Parameters without a gradient, of this backward or an earlier one that was not reduced.
std::vector<std::string> DistributedDataParallel::Impl::unwritten() const {
  std::vector<std::string> names;
  for (std::size_t b = next; b < buckets.size(); ++b) {
    for (std::size_t s = buckets[b].first_slot; s < buckets[b].last_slot; ++s) {
      if (!slot_of(buckets[b], s).holds_gradient()) {
        names.push_back(parameter_of(buckets[b], s).name);
      }
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
    for (std::size_t s = bucket.first_slot; s < bucket.last_slot; ++s) {
      core::GradientSlot& slot = slot_of(bucket, s);
      if (slot.holds_gradient()) continue;
      autograd::join_run(parameter_of(bucket, s).tensor);
      slot.write();
      kernels::fill(slot.memory(), 0.0);
    }
    reduce(bucket);
  }
  wait_for_streams();
  group.check();
  run = 0;
}

void DistributedDataParallel::Impl::synchronize(bool on) {
  world_synchronizes = on;
}

namespace {

/// ddp.world(): the group's, and what only the model's gradients tell.
class ModelLink final : public core::WorldLink {
 public:
  explicit ModelLink(std::weak_ptr<DistributedDataParallel::Impl> ddp) : ddp_(std::move(ddp)) {}

  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    return alive()->group.exchange(value, name);
  }
  bool reduces_gradients() const override { return true; }
  void synchronize(bool on) override { alive()->synchronize(on); }
  std::optional<std::vector<core::NonFinite>> take_local_nonfinite() override {
    const auto ddp = alive();
    if (!ddp->options.check_local_gradients || ddp->group.world_size() == 1) return std::nullopt;
    return ddp->local_checks.take(*ddp->arena);
  }

 private:
  std::shared_ptr<DistributedDataParallel::Impl> alive() const {
    std::shared_ptr<DistributedDataParallel::Impl> ddp = ddp_.lock();
    CAIRN_CHECK(ddp, "ddp", "expected a DistributedDataParallel that lives as long as its world() ",
                "is used, got one that has ended");
    return ddp;
  }

  std::weak_ptr<DistributedDataParallel::Impl> ddp_;
};

}  // namespace

DistributedDataParallel::DistributedDataParallel(nn::Module& model, ProcessGroup group,
                                                 const DistributedOptions& options) {
  check(options);
  if (group.world_size() > 1) {
    check_same_model(model, group);
    broadcast_model(model, group);
    group.wait();
  }
  impl_ = std::make_shared<Impl>(model, std::move(group), options);
  impl_->connect(impl_);
}

core::World DistributedDataParallel::world() const {
  return {impl_->group.rank(), impl_->group.world_size(), std::make_shared<ModelLink>(impl_)};
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
  if (impl_->group.world_size() == 1) return;
  broadcast_buffers(*impl_->model, impl_->group);
  impl_->group.wait();
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
    for (std::size_t s = planned.first_slot; s < planned.last_slot; ++s) {
      bucket.parameters.push_back(impl_->parameter_of(planned, s).name);
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
  impl_->local_checks = {};  // of gradients that are gone
  for (const auto& [name, tensor] : impl_->parameters) Tensor(tensor).clear_grad();
  impl_->plan();
}

}  // namespace cairn::parallel
