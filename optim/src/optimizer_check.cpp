// Pass 1: what the gradients are, and gathering those of several backwards.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"

namespace cairn::optim {

namespace {

/// Tensors of one device, and which parameters they are of.
struct List {
  Device device;
  std::vector<TensorView> views;
  std::vector<TensorView> sums;     // of stash
  std::vector<TensorView> weights;  // of LARC
  std::vector<std::size_t> parameters;
};

List& list_of(std::vector<List>& lists, Device device) {
  const auto found = std::find_if(lists.begin(), lists.end(),
                                  [&](const List& list) { return list.device == device; });
  if (found != lists.end()) return *found;
  List& list = lists.emplace_back();
  list.device = device;
  return list;
}

bool is_written(const core::GradMeta* meta) {
  return meta != nullptr && meta->requires_grad && meta->grad &&
         (!meta->slot || meta->grad_written);
}

}  // namespace

/// The gradient that a step would use: the stashed sum, or what is written; null: none.
const Tensor* Optimizer::gradient_of(std::size_t group, std::size_t index) const {
  const NamedTensor& parameter = groups_[group].parameters[index];
  const State& state = state_[group][index];
  const core::GradMeta* meta = parameter.tensor.meta_or_null();
  const bool written = is_written(meta);
  if (!state.summed) return written ? meta->grad.get() : nullptr;
  CAIRN_CHECK(!written, "optimizer", "expected stashed gradients alone, got '", parameter.name,
              "' with one in its slot too (stash() it first)");
  return parameter.tensor.requires_grad() ? &state.sum : nullptr;
}

PendingReport Optimizer::begin_check(double norm_type) const {
  CAIRN_CHECK(norm_type >= 1, "optimizer", "expected a norm type >= 1, got ", norm_type);
  std::vector<double> types{norm_type};
  const auto need = [&](double type) {
    if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
  };
  if (larc_ || own_max_norm() > 0) need(2.0);
  if (const std::optional<double> type = running_norm_type()) need(*type);

  std::vector<List> lists;
  std::size_t parameter = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i, ++parameter) {
      const Tensor* gradient = gradient_of(g, i);
      if (gradient == nullptr) continue;
      List& list = list_of(lists, gradient->device());
      list.views.push_back(*gradient);
      list.parameters.push_back(parameter);
      if (!larc_) continue;
      const Tensor& weight = groups_[g].parameters[i].tensor;
      const core::GradMeta& meta = weight.meta();
      list.weights.push_back(meta.master ? *meta.master : weight);
    }
  }

  PendingReport pending;
  pending.optimizer_ = this;
  pending.norm_type_ = norm_type;
  pending.types_ = types;
  pending.has_weights_ = larc_ != nullptr;
  for (const List& list : lists) {
    for (const double type : types) {
      pending.passes_.push_back({PendingReport::Of::gradients, type, list.parameters,
                                 kernels::check_tensors(list.views, type)});
    }
    if (list.weights.empty()) continue;
    pending.passes_.push_back({PendingReport::Of::weights, 2.0, list.parameters,
                               kernels::check_tensors(list.weights, 2.0)});
  }
  return pending;
}

PendingReport Optimizer::stash(double scale) {
  CAIRN_CHECK(std::isfinite(scale), "optimizer", "expected a finite scale to stash with, got ",
              scale);
  std::vector<Tensor> temporaries;
  std::vector<List> first, further;  // sums that are overwritten, sums that are added to
  std::size_t parameter = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i, ++parameter) {
      const Tensor& tensor = groups_[g].parameters[i].tensor;
      const core::GradMeta* meta = tensor.meta_or_null();
      if (!is_written(meta)) continue;
      State& state = state_[g][i];
      if (!state.sum.defined() || state.sum.device() != tensor.device()) {
        constexpr auto category = core::MemoryCategory::gradients;
        state.sum = state.summed ? copy_beside(tensor, state.sum, DType::f32, category)
                                 : empty_beside(tensor, DType::f32, category);
      }
      List& list = list_of(state.summed ? further : first, tensor.device());
      list.views.push_back(laid_out_like(tensor, *meta->grad, temporaries));
      list.sums.push_back(state.sum);
      list.parameters.push_back(parameter);
    }
  }

  PendingReport pending;
  pending.optimizer_ = this;
  pending.types_ = {2.0};
  for (const List& list : first) {
    pending.passes_.push_back({PendingReport::Of::gradients, 2.0, list.parameters,
                               kernels::multi_tensor_scale(list.views, list.sums, scale)});
  }
  for (const List& list : further) {
    pending.passes_.push_back(
        {PendingReport::Of::gradients, 2.0, list.parameters,
         kernels::multi_tensor_axpby(scale, list.views, 1.0, list.sums, list.sums,
                                     kernels::CheckedArgument::x)});
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      Tensor tensor = groups_[g].parameters[i].tensor;
      if (!is_written(tensor.meta_or_null())) continue;
      tensor.clear_grad();
      state_[g][i].summed = stashed_ = true;
    }
  }
  return pending;
}

void Optimizer::clear_grad() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      Tensor(groups_[g].parameters[i].tensor).clear_grad();
      state_[g][i].summed = false;
    }
  }
  stashed_ = false;
}

}  // namespace cairn::optim
