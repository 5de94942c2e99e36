// state_dict, load_state_dict and clone.
#include <unordered_map>
#include <unordered_set>

#include "cairn/core/deferred.h"
#include "cairn/core/generator.h"
#include "cairn/core/sharding.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

using core::DataError;
using core::fail;

namespace {

// What files hold: the exact value of a half weight that has a master, else the tensor itself.
StateDict::Value saved_value(const Tensor& tensor, bool as_f32) {
  const bool has_value = as_f32 || kernels::MasterWeight::exists(tensor);
  const bool in_parts = core::WeightInParts::of(tensor) != nullptr;
  if (has_value || in_parts) return kernels::exported_state(tensor);
  return tensor.detach();
}

// "a.b.c" -> tensor.
void flatten(const StateDict& state, const std::string& path,
             std::vector<std::pair<std::string, const StateDict::Value*>>& all) {
  for (const auto& [key, value] : state) {
    const std::string name = path.empty() ? key : core::str(path, ".", key);
    if (const auto* dict = std::get_if<StateDict>(&value)) {
      flatten(*dict, name, all);
    } else {
      all.emplace_back(name, &value);
    }
  }
}

// What keeps the value from being loaded into the tensor; empty: nothing.
std::string problem(const std::string& name, const StateDict::Value& value, const Tensor& tensor) {
  const auto* shard = std::get_if<Shard>(&value);
  const auto* given = shard == nullptr ? std::get_if<Tensor>(&value) : &shard->tensor;
  if (given == nullptr || !given->defined()) return core::str("'", name, "' is not a tensor");
  const Shape& shape = shard == nullptr ? given->shape() : shard->whole;
  if (shape != tensor.shape()) {
    return core::str("'", name, "' has shape ", shape, " instead of ", tensor.shape());
  }
  if (shard != nullptr && !kernels::is_stored_part(tensor, *shard)) {
    return core::str("'", name, "' is a part of it that this rank does not keep");
  }
  if (core::is_floating(given->dtype()) != core::is_floating(tensor.dtype())) {
    return core::str("'", name, "' is ", given->dtype(), " instead of ", tensor.dtype());
  }
  return {};
}

}  // namespace

StateDict Module::state_of(std::unordered_set<const void*>& seen, bool as_f32) const {
  as_f32 = as_f32 || saves_f32_;
  StateDict state;
  for (const NamedTensors* list : {&parameters_, &buffers_}) {
    for (const NamedTensor& entry : *list) {
      if (!seen.insert(entry.tensor.id()).second) continue;  // tied: under its first name
      state.set(entry.name, saved_value(entry.tensor, as_f32));
    }
  }
  for (const auto& [name, child] : children_) {
    StateDict inner = child->state_of(seen, as_f32);
    if (!inner.empty()) state.set(name, std::move(inner));
  }
  return state;
}

StateDict Module::state_dict() const {
  std::unordered_set<const void*> seen;
  return state_of(seen, false);
}

void Module::load_state_dict(const StateDict& state) {
  NamedTensors own = parameters();
  const NamedTensors more = buffers();
  own.insert(own.end(), more.begin(), more.end());
  std::vector<std::pair<std::string, const StateDict::Value*>> given;
  flatten(state, "", given);

  std::unordered_map<std::string, const StateDict::Value*> by_name(given.begin(), given.end());
  std::vector<std::string> problems;
  std::unordered_set<std::string> known;
  for (const NamedTensor& entry : own) {
    known.insert(entry.name);
    const auto found = by_name.find(entry.name);
    if (found == by_name.end()) {
      problems.push_back(core::str("'", entry.name, "' is missing"));
    } else if (std::string what = problem(entry.name, *found->second, entry.tensor);
               !what.empty()) {
      problems.push_back(std::move(what));
    }
  }
  for (const auto& [name, value] : given) {
    if (!known.contains(name)) problems.push_back(core::str("'", name, "' is not in the model"));
  }
  if (!problems.empty()) {
    std::string text;
    for (const std::string& what : problems) text += (text.empty() ? "" : "; ") + what;
    fail<DataError>("load_state_dict", "expected the model's entries, got ", problems.size(),
                    " that differ: ", text);
  }
  std::erase_if(own, [&](const NamedTensor& entry) {
    const auto* same = std::get_if<Tensor>(by_name.at(entry.name));
    return same != nullptr && !core::deferred(*same).empty() &&
           same->storage() == entry.tensor.storage();
  });
  // A half weight keeps the exact value if it trains; a frozen one if it has a master already.
  for (const auto& [name, weight] : own)
    kernels::prepare_to_write(weight, *by_name.at(name), weight.requires_grad());
  for (const auto& [name, weight] : own) {
    const bool in_parts = core::WeightInParts::of(weight) != nullptr;  // else it has its master now
    kernels::write_weight(weight, *by_name.at(name), in_parts && weight.requires_grad());
  }
}

// ---- clone

std::shared_ptr<Module> Module::make_like() const {
  fail<core::Unsupported>("clone", "expected a module that can be built again, got ", kind(),
                          " (override make_like)");
}

namespace {
// device: where the copies lie, which have no masters then; null: where their originals do.
void copy_tensors(const NamedTensors& from, const NamedTensors& to, const Device* device,
                  const std::string& kind) {
  CAIRN_CHECK(from.size() == to.size(), "clone", "expected make_like of ", kind, " to give ",
              from.size(), " tensors, got ", to.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const Tensor& source = from[i].tensor;
    Tensor target = to[i].tensor;
    CAIRN_CHECK(from[i].name == to[i].name && source.shape() == target.shape(), "clone",
                "expected make_like of ", kind, " to give '", from[i].name, "' ", source.shape(),
                ", got '", to[i].name, "' ", target.shape());
    const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
    const Strides strides =
        source.view().is_dense() ? source.strides() : core::contiguous_strides(source.shape());
    const Tensor data = Tensor::empty_strided(source.shape(), strides, source.dtype(),
                                              device != nullptr ? *device : source.device());
    kernels::copy(source, data);
    target.set_data(data);
    target.set_requires_grad(source.requires_grad());
    if (device != nullptr) continue;
    if (const auto* master = kernels::MasterWeight::of(source)) {
      kernels::MasterWeight::assign(target, kernels::master_value(source), master->storage());
    }
  }
}
}  // namespace

void Module::copy_into(Module& copy, const Device* device) const {
  copy_tensors(parameters_, copy.parameters_, device, kind());
  copy_tensors(buffers_, copy.buffers_, device, kind());
  CAIRN_CHECK(children_.size() == copy.children_.size(), "clone", "expected make_like of ", kind(),
              " to give ", children_.size(), " children, got ", copy.children_.size());
  for (std::size_t i = 0; i < children_.size(); ++i) {
    children_[i].second->copy_into(*copy.children_[i].second, device);
  }
}

void Module::follow(const Module& original) {
  CAIRN_CHECK(children_.size() == original.children_.size(), "follow", "expected a clone of ",
              original.kind(), " with its ", original.children_.size(), " children, got ",
              children_.size());
  training_ = original.training_;
  wrappers_ = original.wrappers_;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    children_[i].second->follow(*original.children_[i].second);
  }
}

std::shared_ptr<Module> Module::clone() const {
  return clone_on(nullptr);
}

std::shared_ptr<Module> Module::clone(Device device) const {
  const core::DefaultDeviceGuard guard(device);
  return clone_on(&device);
}

std::shared_ptr<Module> Module::clone_on(const Device* device) const {
  const Generator before = Generator::current();  // initial values are drawn for nothing
  std::shared_ptr<Module> copy = make_like();
  Generator::current() = before;
  copy_into(*copy, device);
  copy->follow(*this);
  return copy;
}

}  // namespace cairn::nn
