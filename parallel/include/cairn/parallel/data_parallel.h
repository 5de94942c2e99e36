// One process with several devices: a batch is cut along dimension 0, and a replica of the model on
// each device takes a part. Gradients are the unsplit model's, on the model's own parameters.
//
//   parallel::DataParallelModel net(model, devices);  // outputs stay on their devices
//   parallel::DataParallelCriterion criterion(        // and so do the losses, but for their sum
//       [](const Tensor& y, const Tensor& t) { return nn::cross_entropy(y, t); });
//   autograd::backward(criterion(net(x), labels));
//
//   parallel::DataParallel all(model, devices);       // outputs are gathered on one device
//   autograd::backward(nn::cross_entropy(all(x), labels));
//
// Parts are as equal as ceil(N / devices) makes them: the last may be shorter, and devices that are
// left over idle. The first runs in the calling thread, the others in a thread for each device,
// with the caller's gradient mode, autocast region, current streams and memory category, and random
// numbers of their own that follow from the caller's. An error of a part, of the first device that
// has one, is thrown when all parts have ended, with the device's name.
//
// The model itself is the first device's replica and must lie there. The others are made once; a
// parameter is copied to them before a forward if it was written since the last. Backward runs in
// the calling thread; a parameter's gradients are added in the order of the devices, so that runs
// have the same bits. Buffers are the first device's: what batch norms of other devices learn is
// dropped. For devices of several processes or machines, and for speed: DistributedDataParallel.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "cairn/nn/losses.h"
#include "cairn/nn/module.h"

namespace cairn::parallel {

/// The parts of x [N, ...] along dimension 0, each on its device; differentiable. As many as
/// devices, or fewer where N is small; one where N is 0.
std::vector<Tensor> scatter(const Tensor& x, const std::vector<Device>& devices);
/// Parts [n, ...] one after the other along dimension 0, on the device; differentiable. Scalars
/// become a vector.
Tensor gather(const std::vector<Tensor>& parts, Device device);
/// The same for each of several outputs: parts[i] has those of part i.
std::vector<Tensor> gather(const std::vector<std::vector<Tensor>>& parts, Device device);

/// Leaves the output of each device where it is.
class DataParallelModel {
 public:
  /// The model must outlive this, and every module of it must override make_like(). No devices: all
  /// of the kind that the model lies on. Throws InvalidArgument for a repeated device and for
  /// a model that is not on the first one, Unsupported for synchronised batch norms.
  explicit DataParallelModel(nn::Module& model, std::vector<Device> devices = {});
  ~DataParallelModel();
  DataParallelModel(DataParallelModel&&) noexcept;
  DataParallelModel& operator=(DataParallelModel&&) noexcept;

  std::vector<Tensor> operator()(const Tensor& x);

  /// Several inputs [N, ...] and any result: f(replica, the part of each input), on each device.
  template <class F>
  auto apply(const std::vector<Tensor>& inputs, F f) {
    using Result = std::invoke_result_t<F&, nn::Module&, const std::vector<Tensor>&>;
    std::vector<Result> results;
    run(
        inputs, [&](std::size_t parts) { results.resize(parts); },
        [&](std::size_t i, nn::Module& replica, const std::vector<Tensor>& part) {
          results[i] = f(replica, part);
        });
    return results;
  }

  const std::vector<Device>& devices() const;
  nn::Module& module() const;

 private:
  void run(const std::vector<Tensor>& inputs, const std::function<void(std::size_t parts)>& begin,
           const std::function<void(std::size_t, nn::Module&, const std::vector<Tensor>&)>& work);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Gathers the outputs on one device: by default the first.
class DataParallel {
 public:
  explicit DataParallel(nn::Module& model, std::vector<Device> devices = {});
  DataParallel(nn::Module& model, std::vector<Device> devices, Device output_device);

  Tensor operator()(const Tensor& x) { return gather(model_(x), output_device_); }

  const std::vector<Device>& devices() const { return model_.devices(); }
  nn::Module& module() const { return model_.module(); }

 private:
  DataParallelModel model_;
  Device output_device_;
};

struct DataParallelCriterionOptions {
  /// What the loss function does with the losses of its part. mean: weighted by how many each part
  /// has; none: the parts' losses are gathered on the first device.
  autograd::Reduction reduction = autograd::Reduction::mean;
  /// How many losses a part's mean is over; none given: the target's samples. Where a loss ignores
  /// targets: those that it counts. A part with none adds nothing.
  std::function<double(const Tensor& target)> count;
};

/// The loss of outputs that lie on several devices, each computed where its output is.
class DataParallelCriterion {
 public:
  /// Called from several threads at once.
  using Loss = std::function<Tensor(const Tensor& output, const Tensor& target)>;
  explicit DataParallelCriterion(Loss loss, DataParallelCriterionOptions options = {});
  ~DataParallelCriterion();
  DataParallelCriterion(DataParallelCriterion&&) noexcept;
  DataParallelCriterion& operator=(DataParallelCriterion&&) noexcept;

  /// The loss over the whole batch, on the first output's device. target [M, ...] is cut in
  /// proportion to the outputs' sizes.
  Tensor operator()(const std::vector<Tensor>& outputs, const Tensor& target);
  /// Targets that lie on their outputs' devices already.
  Tensor operator()(const std::vector<Tensor>& outputs, const std::vector<Tensor>& targets);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
