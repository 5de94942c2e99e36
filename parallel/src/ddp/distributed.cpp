#include "cairn/parallel/distributed.h"

#include <utility>

#include "cairn/autograd/ops.h"
#include "cairn/core/error.h"
#include "cairn/parallel/flatten.h"
#include "ddp/ddp.h"
#include "ddp/model_sync.h"
#include "reducer/options.h"

namespace cairn::parallel {
namespace {

/// ddp.world(): the group's, and what only the model's gradients tell.
class ModelLink final : public core::WorldLink {
 public:
  explicit ModelLink(std::weak_ptr<DistributedDataParallel::Impl> ddp) : ddp_(std::move(ddp)) {}

  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    return alive()->reducer_world.exchange(value, name);
  }
  core::LibraryVersions libraries() const override { return alive()->reducer_world.libraries(); }
  bool reduces_gradients() const override { return true; }
  std::vector<int> job_ranks() const override { return alive()->job_ranks(); }
  /// Where ranks divide gradients each backward reduces, into sums that are divided too: whole
  /// gradients are for those who ask for them by no_sync().
  void synchronize(bool on) override {
    if (const auto ddp = alive(); !ddp->shards_gradients()) ddp->no_sync.synchronize(on);
  }
  std::optional<std::vector<core::NonFinite>> take_local_nonfinite() override {
    return alive()->reducer_world.take_local_nonfinite();
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

ReducerOptions DistributedOptions::of_reducer() const {
  return {.first_bucket_bytes = first_bucket_bytes,
          .bucket_bytes = bucket_bytes,
          .delay_allreduce = delay_allreduce,
          .allreduce_always_fp32 = allreduce_always_fp32,
          .average = average,
          .gradient_predivide_factor = gradient_predivide_factor,
          .trigger_parameters = trigger_parameters,
          .num_allreduce_streams = num_allreduce_streams,
          .retain_allreduce_buffers = retain_allreduce_buffers,
          .check_local_gradients = check_local_gradients,
          .hook = hook};
}

DistributedDataParallel::DistributedDataParallel(nn::Module& model, ProcessGroup group,
                                                 const DistributedOptions& options)
    : DistributedDataParallel(model, std::move(group), {.distributed = options}, std::nullopt) {}

DistributedDataParallel::DistributedDataParallel(nn::Module& model, ProcessGroup group,
                                                 const ShardedOptions& options,
                                                 std::optional<ZeroStage> stage) {
  check_options(options.distributed.of_reducer());
  if (group.world_size() > 1) {
    check_same_options_and_model(options, stage, model, group);
    warn_of_devices(model, group);
    broadcast_weights(model.parameters(), group);
    broadcast_parameters(model.buffers(), group);
    group.wait();
  }
  impl_ = std::make_shared<Impl>(model, std::move(group), options, stage);
  impl_->connect();
  if (impl_->units) impl_->units->connect();
}

core::World DistributedDataParallel::world() const {
  return {impl_->group.rank(), impl_->group.world_size(), std::make_shared<ModelLink>(impl_)};
}

DistributedDataParallel::~DistributedDataParallel() = default;
DistributedDataParallel::DistributedDataParallel(DistributedDataParallel&&) noexcept = default;
DistributedDataParallel& DistributedDataParallel::operator=(DistributedDataParallel&&) noexcept =
    default;

Tensor DistributedDataParallel::operator()(const Tensor& x) {
  impl_->forward_begins(x);
  return (*impl_->model)(x);
}

DistributedDataParallel::NoSync::NoSync(int* depth) : depth_(depth) {}
DistributedDataParallel::NoSync::NoSync(NoSync&& other) noexcept
    : depth_(std::exchange(other.depth_, nullptr)) {}
DistributedDataParallel::NoSync::~NoSync() {
  if (depth_ != nullptr) --*depth_;
}

DistributedDataParallel::NoSync DistributedDataParallel::no_sync(bool enabled) {
  return NoSync(enabled ? impl_->no_sync.enter() : nullptr);
}

DistributedDataParallel::Join DistributedDataParallel::join(DivideBy divide_by) {
  if (impl_->units) {
    core::fail<core::Unsupported>(
        "ddp",
        "expected as many batches on every rank where weights are "
        "gathered in each forward, got join() (ZeroStage::gradients keeps "
        "whole weights)");
  }
  CAIRN_CHECK(!impl_->uneven_inputs, "ddp", "expected one join() at a time, got another one");
  CAIRN_CHECK(
      impl_->options.average || divide_by != DivideBy::samples, "ddp",
      "expected gradients that are averaged, to be weighted by samples, got average = false");
  impl_->uneven_inputs = std::make_unique<UnevenInputs>(divide_by);
  return Join(impl_);
}

DistributedDataParallel::Join::Join(Join&& other) noexcept = default;
DistributedDataParallel::Join::~Join() {
  if (!ddp_) return;
  ddp_->uneven_inputs.reset();
  ddp_->reducer.set_weights(1.0, 1.0);
}

void DistributedDataParallel::Join::samples(std::int64_t count) {
  CAIRN_CHECK(count > 0, "ddp", "expected a number of samples above 0, got ", count);
  ddp_->uneven_inputs->set_samples(count);
}

bool DistributedDataParallel::Join::other_ranks_have_batches() {
  return ddp_->other_ranks_have_batches();
}

Tensor DistributedDataParallel::Join::zero() const {
  ddp_->arena->pull_foreign_changes();
  Tensor total;
  for (const auto& [name, tensor] : ddp_->parameters) {
    if (!tensor.requires_grad()) continue;
    Tensor part = autograd::affine(autograd::to(autograd::sum(tensor), DType::f32), 0.0, 0.0);
    if (total.defined() && total.device() != part.device())
      part = autograd::to(part, total.device());
    total = total.defined() ? autograd::add(total, part) : part;
  }
  CAIRN_CHECK(total.defined(), "ddp", "expected a parameter that requires a gradient, got none");
  return total;
}

void DistributedDataParallel::sync_buffers() {
  impl_->sync_buffers(0);
}

nn::Module& DistributedDataParallel::module() const {
  return *impl_->model;
}
const ProcessGroup& DistributedDataParallel::group() const {
  return impl_->group;
}

std::vector<DistributedDataParallel::Bucket> DistributedDataParallel::buckets() const {
  return impl_->reducer.buckets();
}
std::vector<TensorView> DistributedDataParallel::reduced_buckets() const {
  return impl_->reducer.reduced_buckets();
}
const std::vector<std::string>& DistributedDataParallel::unused_parameters() const {
  return impl_->unused.names;
}

StateDict DistributedDataParallel::state_dict() const {
  return impl_->reducer.state_dict();
}

void DistributedDataParallel::load_state_dict(const StateDict& state) {
  impl_->reducer.load_state_dict(state);
  for (const auto& [name, tensor] : impl_->parameters) Tensor(tensor).clear_grad();
}

}  // namespace cairn::parallel
