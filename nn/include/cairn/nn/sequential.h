// Modules one after another: Sequential(Linear(4, 8), ReLU(), Linear(8, 2)). Children are named
// "0", "1", ...
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

  /// Runs the modules in forward()'s stead, for example with some of them recomputed; clones take it
  /// along. Empty: one after another.
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

}  // namespace cairn::nn
