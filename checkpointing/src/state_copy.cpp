#include "state_copy.h"

#include "flat_state.h"
#include "host_copy.h"

namespace cairn::checkpointing {

StateDict deep_copy(const StateDict& state) {
  FlatState entries = flatten(state);
  for (auto& [name, value] : entries) {
    auto* tensor = std::get_if<Tensor>(&value);
    if (tensor == nullptr || !tensor->defined()) continue;
    const Tensor host = on_host(*tensor);
    const Tensor copy = Tensor::empty(host.shape(), host.dtype(), Device{});
    core::copy_bytes(host, copy);
    *tensor = copy;
  }
  return unflatten(entries);
}

}  // namespace cairn::checkpointing
