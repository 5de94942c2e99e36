// Module: a layer or model, with named parameters, buffers and children, a forward, and state.
//
//   class Block : public nn::Module {
//    public:
//     Block() : fc_(add_module("fc", nn::Linear(10, 20))) {}
//     std::string kind() const override { return "Block"; }
//     Tensor forward(const Tensor& x) override { return autograd::relu((*fc_)(x)); }
//    private:
//     std::shared_ptr<nn::Linear> fc_;
//   };
//
// clone() works on a class that overrides make_like() as well. layer.h says the same in fewer
// lines.
//
// Modules move but do not copy (clone() does). Parameters are f32 leaves that require a gradient;
// amp::initialize and to() change their dtype or device in place: every handle to a parameter stays
// valid.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/tensor.h"

namespace cairn::nn {

class Module : public core::Stateful {
 public:
  using Forward = std::function<Tensor(const Tensor&)>;
  using ForwardWrapper = std::function<Tensor(const Tensor& x, const Forward& next)>;

  Module() = default;
  Module(Module&&) = default;
  Module& operator=(Module&&) = default;

  virtual std::string kind() const = 0;  // "Linear"
  /// Batch norms of any kind: amp keeps their statistics, and at O2 their weights, in f32.
  virtual bool is_batch_norm() const { return false; }
  virtual Tensor forward(const Tensor& x) = 0;
  /// Runs the wrappers (outermost last added), then forward. An error of Cairn's says in which
  /// layer it came: "... (in layer3.0.conv1)". Throws InvalidArgument for a layer that a model
  /// calls in its forward without having registered it, where no optimizer has the layer's
  /// parameters although one has the model's: it would not be trained.
  Tensor operator()(const Tensor& x);
  /// Puts itself around every later call: amp's input and output casts are such wrappers.
  /// `name` says whose it is.
  void add_forward_wrapper(ForwardWrapper wrapper, std::string name = "");
  void remove_forward_wrappers(const std::string& name);  // those of this name
  bool has_forward_wrapper(const std::string& name) const;
  /// state_dict() of this module holds half tensors as f32 (amp: a file of any level loads at any
  /// other). Not copied by clone().
  void set_saves_f32(bool value) { saves_f32_ = value; }

  /// Parameters with full names ("0.weight", "block.fc.bias") in registration order; a tied
  /// parameter once, under its first name. Each tensor carries its name in the outermost module it
  /// was registered in.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  /// This module and all below it, parents first, with full names ("" for this one).
  std::vector<std::pair<std::string, Module*>> modules();
  void apply(const std::function<void(Module&)>& f);  // children first

  Module& train(bool training = true);
  Module& eval() { return train(false); }
  bool training() const { return training_; }

  /// Floating parameters and buffers, from their exact values; drops gradients and masters.
  Module& to(DType dtype);
  Module& to(Device device);

  /// A deep copy: same structure, own tensors with the same values, dtypes, devices, requires_grad
  /// and training mode, and the masters of half weights; no gradients or hooks. Forward wrappers
  /// come along. Throws Unsupported, naming the class, where one below does not override
  /// make_like().
  std::shared_ptr<Module> clone() const;
  /// The same on another device, without the masters: a replica, which is not trained itself.
  std::shared_ptr<Module> clone(Device device) const;
  /// Takes over the training modes and forward wrappers of `original`, of which this is a clone.
  void follow(const Module& original);
  void clear_grad();

  /// Parameters (the f32 master where there is one, put together where it is kept as weight and
  /// remainder: files hold full precision) and buffers, nested by module. A kernel that would write
  /// one that is not the model's memory itself, the f32 value of a half tensor, throws
  /// InvalidArgument.
  StateDict state_dict() const override;
  /// Writes values into the existing tensors: into the master and, rounded, into the half weight
  /// where there is a master; a half weight that requires a gradient gets one where the value does
  /// not fit it. Gradients stay, as in PyTorch (a window goes on); loading an optimizer's state or
  /// amp's drops them. Reports every missing, surplus and mis-shaped entry in one DataError before
  /// anything changes.
  void load_state_dict(const StateDict& state) override;

  std::string extra() const { return extra_; }  // sizes and options, for the summary

 protected:
  /// Marks the tensor a leaf that requires a gradient; returns it.
  Tensor add_parameter(const std::string& name, Tensor value);
  Tensor add_buffer(const std::string& name, Tensor value);
  template <class M>
  std::shared_ptr<M> add_module(const std::string& name, M module) {
    auto shared = std::make_shared<M>(std::move(module));
    add_child(name, shared);
    return shared;
  }
  void add_child(const std::string& name, std::shared_ptr<Module> module);
  static std::shared_ptr<Module> make_like_of(const Module& module) { return module.make_like(); }
  const std::vector<std::pair<std::string, std::shared_ptr<Module>>>& children() const {
    return children_;
  }
  /// A new module built like this one (sizes and options; values do not matter): what clone()
  /// fills.
  virtual std::shared_ptr<Module> make_like() const;
  std::string extra_;

 private:
  friend std::string summary(Module& module, const Shape& input_shape, DType dtype);
  template <class M>
  friend class Child;
  Tensor run_wrapped(const Tensor& x);
  void check_registered() const;
  std::shared_ptr<Module> clone_on(const Device* device) const;
  void copy_into(Module& copy, const Device* device) const;
  void check_free(const std::string& name) const;
  StateDict state_of(std::unordered_set<const void*>& seen, bool as_f32) const;
  void collect(const std::string& path, NamedTensors Module::*list,
               std::unordered_set<const void*>& seen, NamedTensors& all) const;
  NamedTensors parameters_;
  NamedTensors buffers_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  std::unordered_map<const void*, std::string> first_names_;  // of parameters, by Tensor::id
  struct NamedWrapper {
    std::string name;
    ForwardWrapper wrap;
  };
  std::vector<NamedWrapper> wrappers_;
  std::string name_;  // in the module around it; empty: the outermost
  bool training_ = true;
  bool saves_f32_ = false;
};

/// A table of every module with its output shape for an input of `input_shape`, its parameters and
/// bytes, and totals. Throws InvalidArgument for a layer with parameters to train that the forward
/// calls and no module has registered.
std::string summary(Module& module, const Shape& input_shape, DType dtype = DType::f32);

}  // namespace cairn::nn
