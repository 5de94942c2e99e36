#include "cairn/optim/weight_average.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/kernels/multi_tensor.h"
#include "layout.h"
#include "states.h"

namespace cairn::optim {

namespace {

constexpr const char* kUpdates = "updates";
constexpr const char* kValues = "values";

/// The exact value, where it lies or, of a remainder, put together.
Tensor value_of(const Tensor& weight) {
  if (!kernels::MasterWeight::exists(weight)) return weight;
  const Tensor value = kernels::master_value(weight);
  return value.device() == weight.device() ? value : copy_beside(weight, value, DType::f32);
}

bool alike(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.dtype() == b.dtype() && a.device() == b.device();
}

Tensor bits_of(const Tensor& x) {
  Tensor copy = empty_with_layout_of(x, x.dtype());
  core::copy_bytes(x, copy);
  return copy;
}

}  // namespace

WeightAverage::WeightAverage(const NamedTensors& weights, const WeightAverageOptions& options)
    : options_(options) {
  CAIRN_CHECK(options.decay >= 0 && options.decay < 1, "average",
              "expected a decay in [0, 1), got ", options.decay);
  EachOnce once;
  for (const NamedTensor& weight : weights) {
    const bool is_count = weight.tensor.defined() && !core::is_floating(weight.tensor.dtype());
    if (!is_count) check_dense_float("average", "weights", weight);
    once.add("average", "weight", weight);
    if (is_count) continue;
    weights_.push_back(weight);
    averages_.push_back(
        {weight.name, copy_beside(weight.tensor, value_of(weight.tensor), DType::f32)});
  }
  CAIRN_CHECK(!weights_.empty(), "average",
              "expected weights to average, got none (model.parameters())");
}

/// Weights may have moved since.
void WeightAverage::follow_device() {
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const Tensor& weight = weights_[i].tensor;
    Tensor& average = averages_[i].tensor;
    if (average.device() != weight.device()) average = copy_beside(weight, average, DType::f32);
  }
}

void WeightAverage::update() {
  CAIRN_CHECK(!in_use_, "average",
              "expected the model's own weights to average, got the averages, "
              "which are in use (update() after the scope of use())");
  follow_device();
  struct List {
    std::vector<TensorView> values, averages;
  };
  std::map<std::pair<int, int>, List> lists;  // by device
  std::vector<Tensor> alive;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    alive.push_back(value_of(weights_[i].tensor));
    const Device device = alive.back().device();
    List& list = lists[{static_cast<int>(device.type), device.index}];
    list.values.push_back(alive.back());
    list.averages.push_back(averages_[i].tensor);
  }
  const auto before = static_cast<double>(updates_);
  const double keeps = options_.equal ? before / (before + 1) : options_.decay;
  for (auto& [device, list] : lists) {
    if (updates_ == 0) {
      (void)kernels::multi_tensor_scale(list.values, list.averages, 1.0);
    } else {
      (void)kernels::multi_tensor_axpby(keeps, list.averages, 1 - keeps, list.values,
                                        list.averages);
    }
  }
  ++updates_;
}

AveragesInUse WeightAverage::use() {
  CAIRN_CHECK(!in_use_, "average", "expected averages that are not in use, got a second use()");
  follow_device();
  AveragesInUse scope(this);
  for (const NamedTensor& weight : weights_) {  // all memory is there before anything is written
    const auto* master = kernels::MasterWeight::of(weight.tensor);
    scope.saved_.push_back({weight, bits_of(weight.tensor),
                            master != nullptr ? bits_of(master->tensor()) : Tensor(), 0});
  }
  in_use_ = true;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    kernels::write_weight(weights_[i].tensor, averages_[i].tensor, false);
    scope.saved_[i].written = weights_[i].tensor.storage()->version();
  }
  return scope;
}

AveragesInUse::AveragesInUse(AveragesInUse&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), saved_(std::move(other.saved_)) {}

AveragesInUse::~AveragesInUse() {
  try {
    restore();
  } catch (const std::exception& error) {
    log::error("{}", error.what());
  }
}

void AveragesInUse::restore() {
  if (owner_ == nullptr) return;
  std::exchange(owner_, nullptr)->in_use_ = false;
  std::vector<Tensor> restored;
  std::string written, changed;
  for (const Saved& saved : std::exchange(saved_, {})) {
    const auto& [name, weight] = saved.weight;
    auto* master = kernels::MasterWeight::peek(weight);
    const Tensor exact = master != nullptr ? master->tensor() : Tensor();
    if (!alike(weight, saved.bits) || !alike(exact, saved.master)) {
      if (changed.empty()) changed = name;
      continue;
    }
    if (weight.storage()->version() != saved.written && written.empty()) written = name;
    TensorView bits = weight;
    bits.version = nullptr;  // counted below, with the master
    core::copy_bytes(saved.bits, bits);
    if (master != nullptr) core::copy_bytes(saved.master, master->view_to_write());
    restored.push_back(weight);
  }
  kernels::weights_written(restored);
  if (!written.empty()) {
    log::warn("average: '{}' was written while the averages were in use, which is undone", written);
  }
  CAIRN_CHECK(changed.empty(), "average",
              "expected weights as they were before the averages, got '", changed,
              "', which was cast or moved, or whose master was made or dropped (do so "
              "outside of the scope of use())");
}

StateDict WeightAverage::state_dict() const {
  StateDict state;
  state.set(kUpdates, updates_);
  StateDict& values = state.make_dict(kValues);
  for (const auto& [name, average] : averages_) set_path(values, name, average);
  return state;
}

void WeightAverage::load_state_dict(const StateDict& state) {
  std::map<std::string, Tensor> given;
  std::vector<Tensor> values;  // in the order of the averages
  walk(state.dict(kValues), [&](const std::string& name, const StateDict::Value& value) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) given[name] = *tensor;
  });
  const std::int64_t updates = state.integer(kUpdates);
  Problems problems;
  if (updates < 0) problems.add(updates, " updates");
  for (const auto& [name, average] : averages_) {
    const auto found = given.extract(name);
    if (found.empty()) {
      problems.add("no '", name, "'");
      continue;
    }
    const Tensor& value = found.mapped();
    if (value.shape() == average.shape() && core::is_floating(value.dtype())) {
      values.push_back(value);
    } else {
      problems.add("'", name, "' of shape ", value.shape(), " ", value.dtype(), " instead of ",
                   average.shape(), " f32");
    }
  }
  for (const auto& [name, value] : given) problems.add("'", name, "', which is not averaged");
  problems.throw_if_any("average", "these averages");
  for (std::size_t i = 0; i < values.size(); ++i) kernels::copy(values[i], averages_[i].tensor);
  updates_ = updates;
}

}  // namespace cairn::optim
