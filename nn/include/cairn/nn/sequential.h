// Modules one after another: Sequential(Linear(4, 8), ReLU(), Linear(8, 2)). Children are named
// "0", "1", ... ModuleList holds modules of one class that are called one by one.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cairn/nn/module.h"

namespace cairn::nn {

class Sequential : public Module {
 public:
  template <std::derived_from<Module>... Modules>
  explicit Sequential(Modules... modules) {
    (add(std::move(modules)), ...);
  }

  /// Appends a module and returns it.
  template <std::derived_from<Module> M>
  std::shared_ptr<M> add(M module) {
    return add_module(std::to_string(size()), std::move(module));
  }
  void add(std::shared_ptr<Module> module) { add_child(std::to_string(size()), std::move(module)); }

  std::size_t size() const { return children().size(); }
  /// The i-th module. Throws InvalidArgument.
  Module& at(std::size_t i) const;

  /// Runs the modules in forward()'s stead, for example with some of them recomputed; clones take
  /// it along. Empty: one after another.
  using Runner = std::function<Tensor(Sequential& modules, const Tensor& x)>;
  void set_runner(Runner runner) { runner_ = std::move(runner); }
  const Runner& runner() const { return runner_; }

  std::string kind() const override { return "Sequential"; }
  Tensor forward(const Tensor& x) override;

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  Runner runner_;
};

/// Modules of one class, children "0", "1", ..., for a forward that goes through them by itself:
///
///   nn::ModuleList<nn::Linear> layers;
///   layers.add(nn::Linear(4, 4));
///   for (std::size_t i = 0; i < layers.size(); ++i) x = layers[i](x);
template <std::derived_from<Module> M>
class ModuleList : public Module {
 public:
  M& add(M module) { return *add_module(std::to_string(size()), std::move(module)); }
  std::size_t size() const { return children().size(); }
  /// Throws InvalidArgument.
  M& operator[](std::size_t i) const {
    CAIRN_CHECK(i < size(), "module list", "expected an index below ", size(), ", got ", i);
    return static_cast<M&>(*children()[i].second);
  }
  std::string kind() const override { return "ModuleList"; }
  Tensor forward(const Tensor&) override {
    core::fail("module list",
               "expected its modules to be called one by one, got a call of the list");
  }

 protected:
  std::shared_ptr<Module> make_like() const override {
    auto copy = std::make_shared<ModuleList<M>>();
    for (const auto& [name, child] : children()) copy->add_child(name, make_like_of(*child));
    return copy;
  }
};

}  // namespace cairn::nn
