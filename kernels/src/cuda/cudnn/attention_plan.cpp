#include "cuda/cudnn/attention_plan.h"

#include <sstream>
#include <utility>

#include "cuda/bounded_cache.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kKeptAttentions = 1024;

/// All of a shape but the device's number.
std::string name_of(const SdpaShape& shape) {
  std::ostringstream text;
  text << sdpa_name(kind_of(shape), {shape.queries, shape.keys}) << " B " << shape.batch;
  const auto add = [&](const char* name, const HeadStrides& by) {
    text << ' ' << name << ' ' << by.batch << ' ' << by.head << ' ' << by.row;
  };
  add("q", shape.q), add("k", shape.k), add("v", shape.v), add("y", shape.y);
  if (!shape.backward) return text.str();
  add("dy", shape.dy), add("dq", shape.dq), add("dk", shape.dk), add("dv", shape.dv);
  return text.str();
}

PlannedGraph planned(const SdpaShape& shape) {
  return {.kind = kAttentionPlans,
          .name = name_of(shape),
          .describe = [shape](const Queue& queue, const CudnnHandle& handle) {
            return sdpa_graph(queue, handle, shape);
          }};
}

}  // namespace

SdpaKind kind_of(const SdpaShape& shape) {
  return {.device = shape.device,
          .backward = shape.backward,
          .causal = shape.causal,
          .dtype = shape.dtype,
          .heads = shape.heads,
          .key_heads = shape.key_heads,
          .columns = shape.columns};
}

std::shared_ptr<Plans> sdpa_plans_for(const SdpaShape& shape) {
  using Key = std::pair<std::uint64_t, SdpaShape>;  // a setting that changed asks anew
  static auto& known = *new BoundedCache<Key, std::shared_ptr<Plans>>(kKeptAttentions);
  return known.get({product_setting_epoch(), shape},
                   [&] { return std::make_shared<Plans>(planned(shape)); });
}

}  // namespace cairn::kernels::cuda
