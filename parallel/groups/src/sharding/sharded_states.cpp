#include "cairn/parallel/sharded_states.h"

#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/gradient_slot.h"
#include "cairn/core/world.h"
#include "group/listing.h"
#include "sharding/gather_weights.h"

namespace cairn::parallel {

class ShardedOptimizerStates::Impl final : public core::GradientReducer, public core::RankSet {
 public:
  explicit Impl(ProcessGroup group) : group_(std::move(group)) {}

  OwnPart own_part() const override {
    return {group_.rank(), group_.world_size(), /*gradients=*/false};
  }
  std::vector<std::string> exchange(const std::string& own, std::string_view name) override {
    return group_.exchange(own, name);
  }
  void gather_weights(const std::vector<Tensor>& weights) override {
    gather_parts(parts_in_place(weights, group_), group_);
  }
  void update_failed(const std::string& why) override {
    group_.abort(core::str("its update failed: ", why));
  }
  std::vector<int> job_ranks() const override { return group_.world().job_ranks(); }

 private:
  ProcessGroup group_;
};

namespace {

std::string names_and_shapes(const NamedTensors& parameters) {
  std::string lines;
  for (const auto& [name, tensor] : parameters)
    lines += core::str("'", name, "' ", tensor.dtype(), tensor.shape(), "\n");
  return lines;
}

void check_free(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    CAIRN_CHECK(tensor.gradient_slot().placed(), "sharding",
                "expected parameters and gradients of the trainer's own (optim::wrap_parameter), "
                "got '",
                name, "' without");
    CAIRN_CHECK(tensor.is_contiguous(), "sharding", "expected row-major parameters, got '", name,
                "' with shape ", tensor.shape(), " and strides ", tensor.strides());
    CAIRN_CHECK(tensor.gradient_slot().reducer() == nullptr, "sharding",
                "expected parameters that nothing else divides or reduces, got '", name, "'");
  }
}

}  // namespace

ShardedOptimizerStates::ShardedOptimizerStates(const ProcessGroup& group,
                                               const NamedTensors& parameters)
    : impl_(std::make_shared<Impl>(group)) {
  group.world().all_or_throw("sharding", [&] {
    check_free(parameters);
    return std::string();
  });
  check_same_lists("sharding", "parameters",
                   group.exchange(names_and_shapes(parameters), "parameters"));
  for (const NamedTensor& parameter : parameters)
    parameter.tensor.gradient_slot().set_reducer(impl_);
}

ShardedOptimizerStates::~ShardedOptimizerStates() = default;
ShardedOptimizerStates::ShardedOptimizerStates(ShardedOptimizerStates&&) noexcept = default;
ShardedOptimizerStates& ShardedOptimizerStates::operator=(ShardedOptimizerStates&&) noexcept =
    default;

}  // namespace cairn::parallel
