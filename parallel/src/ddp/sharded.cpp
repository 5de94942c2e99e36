#include "cairn/parallel/sharded.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/kernels/master_weight.h"
#include "ddp/ddp.h"
#include "sharding/gather_weights.h"

namespace cairn::parallel {
namespace {

/// What other stages would leave without effect.
const ShardedOptions& checked(const ShardedOptions& options) {
  const auto refuse = [&](const char* what, bool given) {
    CAIRN_CHECK(!given || options.stage == ZeroStage::parameters, "sharding", "expected ", what,
                " with ZeroStage::parameters only, got it with stage ",
                static_cast<int>(options.stage));
  };
  refuse("units", !options.units.empty());
  refuse("reshard_after_forward = false", !options.reshard_after_forward);
  refuse("reshard_within", options.reshard_within != 0);
  refuse("prefetch", options.prefetch != ShardedOptions{}.prefetch);
  refuse("most_gathered", options.most_gathered != 0);
  refuse("keep_whole", options.keep_whole != 0);
  CAIRN_CHECK(options.prefetch >= 0 && options.most_gathered >= 0 && options.keep_whole >= 0,
              "sharding", "expected prefetch, most_gathered and keep_whole >= 0, got ",
              options.prefetch, ", ", options.most_gathered, " and ", options.keep_whole);
  CAIRN_CHECK(options.reshard_after_forward || options.reshard_within == 0, "sharding",
              "expected no reshard_within with reshard_after_forward = false, got ",
              options.reshard_within);
  const DistributedOptions& distributed = options.distributed;
  const bool by_graph = !distributed.find_unused_parameters && !distributed.static_graph;
  CAIRN_CHECK(
      by_graph || (options.prefetch == ShardedOptions{}.prefetch && options.most_gathered == 0),
      "sharding", "expected no prefetch nor most_gathered with find_unused_parameters or ",
      "static_graph, which gather all units at once, got ", options.prefetch, " and ",
      options.most_gathered, " (leave them out; reshard_after_forward is there)");
  return options;
}

}  // namespace

ShardedDataParallel::ShardedDataParallel(nn::Module& model, ProcessGroup group,
                                         const ShardedOptions& options)
    : DistributedDataParallel(model, std::move(group), checked(options), options.stage),
      stage_(options.stage) {}

GatheredParameters DistributedDataParallel::gather_parameters() {
  if (impl_->units) impl_->units->gather_all();
  return GatheredParameters(impl_->units);
}

GatheredParameters::GatheredParameters(std::shared_ptr<WeightUnits> units)
    : units_(std::move(units)) {}
GatheredParameters::GatheredParameters(GatheredParameters&& other) noexcept = default;
GatheredParameters::~GatheredParameters() {
  try {
    if (units_) units_->give_back();
  } catch (const std::exception& error) {  // the ranks have been told
    log::error("weights that were gathered are lost: {}", error.what());
  }
}

/// Two communicators of NCCL's that are at work on a GPU at once may each keep the other's kernel
/// from starting. Gathers and reductions of one stream are in order.
void DistributedDataParallel::Impl::check_communicators(const NamedTensors& of) const {
  const auto part_of = [](const ProcessGroup& some, const ProcessGroup& all) {
    return some.world_size() > 1 && some.world_size() < all.world_size();
  };
  const bool several =
      part_of(near, shards) || (stage > ZeroStage::optimizer_states && part_of(shards, group));
  const auto on_gpu = std::find_if(
      of.begin(), of.end(), [](const NamedTensor& one) { return one.tensor.device().is_cuda(); });
  if (!several || on_gpu == of.end()) return;
  const char* const options_that_divide = "shard_within and reshard_within on GPUs";
  if (options.num_allreduce_streams > 1)
    core::fail<core::Unsupported>("sharding", "expected one stream for ", options_that_divide,
                                  ", got ", options.num_allreduce_streams, " and '", on_gpu->name,
                                  "' on ", on_gpu->tensor.device());
  for (const auto& [name, module] : model->modules()) {
    if (module->kind() == "SyncBatchNorm")
      core::fail<core::Unsupported>(
          "sharding", "expected no SyncBatchNorm with ", options_that_divide, ", got '", name,
          "', whose collectives nothing orders with theirs (BatchNorm2d, or all ranks)");
  }
}

core::GradientReducer::OwnPart DistributedDataParallel::Impl::own_part() const {
  if (!stage) return {};
  return {shards.rank(), shards.world_size(), shards_gradients()};
}

void DistributedDataParallel::Impl::gather_weights(const std::vector<Tensor>& weights) {
  std::vector<Tensor> whole;
  for (const Tensor& weight : weights) {
    if (core::WeightInParts::of(weight) == nullptr) {
      whole.push_back(weight);
    } else if (units) {
      units->part_updated(weight);
    }
  }
  if (!whole.empty()) gather_parts(parts_in_place(whole, shards), shards);
}

void DistributedDataParallel::Impl::weight_arrived(const Tensor& weight) {
  if (!stage || shards.world_size() == 1) return;
  kernels::MasterWeight::keep_part(
      weight, core::even_part(weight.numel(), shards.rank(), shards.world_size()));
  if (units) units->divide(weight);
}

void DistributedDataParallel::Impl::update_failed(const std::string& why) {
  if (stage) group.abort(core::str("its update failed: ", why));
}

}  // namespace cairn::parallel
