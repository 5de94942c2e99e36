#include "ddp/model_sync.h"

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/parallel/flatten.h"
#include "group/listing.h"
#include "reducer/names.h"

namespace cairn::parallel {
namespace {

std::string list(const nn::Module& model) {
  std::ostringstream out;
  for (const auto& [name, tensor] : model.parameters()) {
    const auto* master = kernels::MasterWeight::peek(tensor);
    const bool remainder =
        master != nullptr && master->storage() == kernels::MasterStorage::remainder;
    out << "parameter '" << name << "' " << tensor.dtype() << tensor.shape()
        << (master == nullptr ? ""
            : remainder       ? " with a remainder"
                              : " with a master")
        << (tensor.requires_grad() ? "" : " frozen");
    const std::string& deferred = core::deferred(tensor);
    out << (deferred.empty() ? "" : ", deferred: ") << deferred << "\n";
  }
  for (const auto& [name, tensor] : model.buffers())
    out << "buffer '" << name << "' " << tensor.dtype() << tensor.shape() << "\n";
  return out.str();
}

/// What a DistributedDataParallel adds to the options of its reducer, which compares those.
std::string list(const DistributedOptions& options) {
  std::ostringstream out;
  out << std::boolalpha << "find_unused_parameters " << options.find_unused_parameters
      << "\nstatic_graph " << options.static_graph << "\nbroadcast_buffers "
      << options.broadcast_buffers << "\n";
  return out.str();
}

/// shard_within is compared where ranks find their groups.
std::string list(const ShardedOptions& options, std::optional<ZeroStage> stage) {
  std::ostringstream out;
  out << std::boolalpha << "stage " << (stage ? static_cast<int>(*stage) : 0) << "\nunits";
  for (const std::string& unit : options.units) out << " '" << unit << "'";
  out << "\nreshard_after_forward " << options.reshard_after_forward << "\nreshard_within "
      << options.reshard_within << "\nprefetch " << options.prefetch << "\nmost_gathered "
      << options.most_gathered << "\nkeep_whole " << options.keep_whole << "\n";
  return out.str();
}

void check_same(const std::string& listing, std::string_view what, const ProcessGroup& group,
                const std::string& losses) {
  const auto digests = group.exchange(digest(listing), of_losses(losses, "the model's parameters"));
  if (all_equal(digests)) return;
  check_same_lists("ddp", what, group.exchange(listing, "the models that differ"));
}

}  // namespace

void check_same_model(const nn::Module& model, const ProcessGroup& group,
                      const std::string& losses) {
  check_same(list(model), "model", group, losses);
}

void check_same_options_and_model(const ShardedOptions& options, std::optional<ZeroStage> stage,
                                  const nn::Module& model, const ProcessGroup& group) {
  const std::string listing = list(options, stage) + list(options.distributed) + list(model);
  check_same(listing, "options and model", group, "");
}

void broadcast_weights(const NamedTensors& parameters, const ProcessGroup& group) {
  NamedTensors weights;
  for (const NamedTensor& one : parameters) {
    if (core::deferred(one.tensor).empty()) weights.push_back(one);  // else all ranks make the same
  }
  for (const auto& [name, tensor] : parameters) {
    if (auto* master = kernels::MasterWeight::of(tensor))
      weights.push_back({name + " (master)", Tensor::wrap(master->view_to_write())});
  }
  broadcast_parameters(weights, group);
  for (const auto& [name, tensor] : parameters) {
    if (auto* master = kernels::MasterWeight::peek(tensor)) master->weight_written(tensor);
  }
}

}  // namespace cairn::parallel
