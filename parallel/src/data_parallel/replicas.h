// Copies of a model on further devices that follow it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/nn/module.h"

namespace cairn::parallel {

class Replicas {
 public:
  /// The model is the replica of the first device.
  Replicas(nn::Module& model, std::vector<Device> devices);

  /// Before a forward through the first `count`: mode, wrappers and values are the model's, and the
  /// gradients of the replicas' parameters flow to the model's where gradients are on.
  void follow_model(std::size_t count);

  nn::Module& model() const { return *model_; }
  nn::Module& at(std::size_t i) const { return i == 0 ? *model_ : *replicas_[i - 1].module; }
  const std::vector<Device>& devices() const { return devices_; }

 private:
  /// A tensor of the model and its copy, and what they held when they were last equal.
  struct Copy {
    Tensor original, copy;
    std::weak_ptr<core::Storage> storage = {};
    std::uint64_t original_version = 0, copy_version = 0;

    bool is_current() const;
    void update();
  };
  struct Replica {
    std::shared_ptr<nn::Module> module;
    std::vector<Copy> parameters, buffers;
  };

  void check_model() const;
  static void connect(const Copy& parameter);

  nn::Module* model_;
  std::vector<Device> devices_;
  std::vector<Replica> replicas_;  // of devices 1, 2, ...
};

}  // namespace cairn::parallel
