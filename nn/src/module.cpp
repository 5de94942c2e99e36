#include "cairn/nn/module.h"

#include <algorithm>
#include <unordered_set>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/memory.h"
#include "cairn/gradients/arena.h"
#include "cairn/kernels/master_weight.h"
#include "running_forward.h"

namespace cairn::nn {

using core::MemoryCategory;
using core::MemoryCategoryGuard;

namespace {

bool is_trained(const NamedTensor& parameter) {
  return gradients::has_optimizer(parameter.tensor);
}

/// The first that wants a gradient and that no optimizer has; empty: there is none.
std::string first_untrained(const Module& module) {
  for (const NamedTensor& parameter : module.parameters()) {
    if (parameter.tensor.requires_grad() && !is_trained(parameter)) return parameter.name;
  }
  return {};
}

bool trains(const Module& module) {
  const NamedTensors all = module.parameters();
  return std::any_of(all.begin(), all.end(), is_trained);
}

/// The outermost forward of this thread.
class ForwardGuard {
 public:
  explicit ForwardGuard(const Module& module)
      : is_outermost_(running_forward().outermost == nullptr) {
    if (is_outermost_) running_forward().outermost = &module;
  }
  ~ForwardGuard() {
    if (is_outermost_) running_forward().outermost = nullptr;
  }
  ForwardGuard(const ForwardGuard&) = delete;
  ForwardGuard& operator=(const ForwardGuard&) = delete;

 private:
  bool is_outermost_;
};

}  // namespace

RunningForward& running_forward() {
  static thread_local RunningForward running;
  return running;
}

void Module::check_registered() const {
  const RunningForward& running = running_forward();
  if (running.outermost == nullptr || running.outermost == this || !name_.empty()) return;
  const bool shown = running.all_are_shown;
  if (!shown && !autograd::grad_enabled()) return;
  const std::string parameter = first_untrained(*this);
  if (parameter.empty() || !(shown || trains(*running.outermost))) return;
  core::fail(running.outermost->kind(), "expected layers that are registered children, got a ",
             kind(), " in its forward that is not: ",
             shown ? "the summary would leave out its '" : "no optimizer has its '", parameter,
             "' (register it with add_module or nn::Child, before the optimizer takes "
             "model.parameters(); freeze with set_requires_grad(false) what is not trained)");
}

Tensor Module::operator()(const Tensor& x) {
  check_registered();
  const ForwardGuard forward(*this);
  try {
    return run_wrapped(x);
  } catch (core::Error& error) {
    if (!name_.empty()) error.add_layer(name_);
    throw;
  }
}

Tensor Module::run_wrapped(const Tensor& x) {
  if (wrappers_.empty()) return forward(x);
  Forward call = [this](const Tensor& input) { return forward(input); };
  for (const NamedWrapper& wrapper : wrappers_) {
    call = [&wrapper, next = std::move(call)](const Tensor& input) {
      return wrapper.wrap(input, next);
    };
  }
  return call(x);
}

void Module::add_forward_wrapper(ForwardWrapper wrapper, std::string name) {
  wrappers_.push_back({std::move(name), std::move(wrapper)});
}

void Module::remove_forward_wrappers(const std::string& name) {
  std::erase_if(wrappers_, [&](const NamedWrapper& wrapper) { return wrapper.name == name; });
}

bool Module::has_forward_wrapper(const std::string& name) const {
  return std::any_of(wrappers_.begin(), wrappers_.end(),
                     [&](const NamedWrapper& wrapper) { return wrapper.name == name; });
}

namespace {
std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}
}  // namespace

std::vector<std::pair<std::string, Module*>> Module::modules() {
  std::vector<std::pair<std::string, Module*>> all{{"", this}};
  for (const auto& [name, child] : children_) {
    for (auto& [path, module] : child->modules()) {
      all.emplace_back(path.empty() ? name : joined(name, path), module);
    }
  }
  return all;
}

void Module::collect(const std::string& path, NamedTensors Module::*list,
                     std::unordered_set<const void*>& seen, NamedTensors& all) const {
  for (const NamedTensor& entry : this->*list) {
    if (!seen.insert(entry.tensor.id()).second) continue;
    all.push_back({joined(path, entry.name), entry.tensor});
  }
  for (const auto& [name, child] : children_) {
    child->collect(joined(path, name), list, seen, all);
  }
}

NamedTensors Module::parameters() const {
  NamedTensors all;
  std::unordered_set<const void*> seen;
  collect("", &Module::parameters_, seen, all);
  return all;
}

NamedTensors Module::buffers() const {
  NamedTensors all;
  std::unordered_set<const void*> seen;
  collect("", &Module::buffers_, seen, all);
  return all;
}

void Module::apply(const std::function<void(Module&)>& f) {
  for (const auto& [name, child] : children_) child->apply(f);
  f(*this);
}

Module& Module::train(bool training) {
  apply([training](Module& module) { module.training_ = training; });
  return *this;
}

namespace {

// Puts other data under every handle; undefined: stays.
template <class Convert>
void convert_all(const NamedTensors& tensors, Convert convert) {
  const autograd::NoGradGuard no_grad;
  const autograd::AutocastGuard no_autocast(false);
  const MemoryCategoryGuard category(MemoryCategory::parameters);
  for (const NamedTensor& entry : tensors) {
    Tensor tensor = entry.tensor;
    const Tensor converted = convert(tensor);
    if (!converted.same(tensor)) tensor.set_data(converted);
  }
}

}  // namespace

Module& Module::to(DType dtype) {
  CAIRN_CHECK(core::is_floating(dtype), "to", "expected a floating dtype, got ", dtype);
  const auto cast = [dtype](const Tensor& x) {
    if (!core::is_floating(x.dtype()) || x.dtype() == dtype) return x;
    if (!kernels::MasterWeight::exists(x)) return autograd::to(x, dtype);
    const Tensor exact = kernels::master_value_beside(x);
    exact.storage()->set_category(MemoryCategory::parameters);
    return autograd::to(exact, dtype);
  };
  convert_all(parameters(), cast);
  convert_all(buffers(), cast);
  return *this;
}

Module& Module::to(Device device) {
  const auto move = [device](const Tensor& x) { return autograd::to(x, device); };
  const NamedTensors all = parameters();
  for (const NamedTensor& entry : all)
    kernels::MasterWeight::of(entry.tensor);  // follow what was written
  convert_all(all, move);
  for (const NamedTensor& entry : all) kernels::MasterWeight::of(entry.tensor);  // and the move
  convert_all(buffers(), move);
  return *this;
}

void Module::clear_grad() {
  for (NamedTensor& entry : parameters()) entry.tensor.clear_grad();
}

namespace {
void check_name(const std::string& name, const std::string& kind) {
  CAIRN_CHECK(!name.empty() && name.find('.') == std::string::npos, kind,
              "expected a name without dots, got '", name, "'");
}

template <class List, class Name>
void check_new(const List& list, const std::string& name, const std::string& kind, Name name_of) {
  for (const auto& entry : list) {
    CAIRN_CHECK(name_of(entry) != name, kind, "expected a new name, got '", name, "' twice");
  }
}
}  // namespace

void Module::check_free(const std::string& name) const {
  check_name(name, "module");
  const auto tensor_name = [](const NamedTensor& entry) { return entry.name; };
  check_new(parameters_, name, "module", tensor_name);
  check_new(buffers_, name, "module", tensor_name);
  check_new(children_, name, "module", [](const auto& entry) { return entry.first; });
}

Tensor Module::add_parameter(const std::string& name, Tensor value) {
  check_free(name);
  CAIRN_CHECK(value.defined(), "module", "expected a tensor as parameter '", name, "', got none");
  value.set_requires_grad(true);
  value.storage()->set_category(MemoryCategory::parameters);
  parameters_.push_back({name, value});
  value.set_name(first_names_.emplace(value.id(), name).first->second);
  return value;
}

Tensor Module::add_buffer(const std::string& name, Tensor value) {
  check_free(name);
  CAIRN_CHECK(value.defined(), "module", "expected a tensor as buffer '", name, "', got none");
  value.storage()->set_category(MemoryCategory::parameters);
  buffers_.push_back({name, value});
  return value;
}

void Module::add_child(const std::string& name, std::shared_ptr<Module> module) {
  check_free(name);
  CAIRN_CHECK(module, "module", "expected a module as child '", name, "', got none");
  module->name_ = name;
  for (NamedTensor& entry : module->parameters()) {
    const auto named = first_names_.emplace(entry.tensor.id(), joined(name, entry.name)).first;
    entry.tensor.set_name(named->second);
  }
  children_.emplace_back(name, std::move(module));
}

}  // namespace cairn::nn
