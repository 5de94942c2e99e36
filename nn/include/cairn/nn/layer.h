// Layer and Child: a module in a line for each child.
//
//   struct Block : nn::Layer<Block, std::int64_t> {
//     using Layer::Layer;  // Block(size)
//     std::int64_t size = argument<0>();
//     nn::Child<nn::LayerNorm> norm{*this, "norm", nn::LayerNorm(size)};
//     nn::Child<nn::Linear> fc{*this, "fc", nn::Linear(size, size)};
//     Tensor forward(const Tensor& x) override { return x + fc(norm(x)); }
//   };
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "cairn/nn/module.h"

namespace cairn::nn {

/// "Block" of my::Block.
std::string class_name(const std::type_info& type);

/// A module that says by itself what it is (kind()) and how another one is built (for clone()):
/// Self is the class that derives from it, Args what its constructor takes, which must be copied
/// easily: sizes, options.
template <class Self, class... Args>
class Layer : public Module {
 public:
  explicit Layer(Args... args) : arguments_(std::move(args)...) {}
  std::string kind() const override { return class_name(typeid(Self)); }

 protected:
  /// What the i-th argument of the constructor was.
  template <std::size_t i>
  const auto& argument() const {
    return std::get<i>(arguments_);
  }
  std::shared_ptr<Module> make_like() const override {
    return std::apply([](const Args&... args) { return std::make_shared<Self>(args...); },
                      arguments_);
  }

 private:
  std::tuple<Args...> arguments_;
};

/// A child of the module that it is a member of. Use it like the child itself: fc(x), fc->weight().
template <class M>
class Child {
 public:
  Child(Module& parent, const std::string& name, M module)
      : module_(parent.add_module(name, std::move(module))) {}
  Tensor operator()(const Tensor& x) const { return (*module_)(x); }
  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }

 private:
  std::shared_ptr<M> module_;
};

}  // namespace cairn::nn
