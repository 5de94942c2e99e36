// A part with one of everything that a state can hold.
#pragma once

#include "cairn/core/error.h"
#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

struct SmallState : core::Stateful {
  Tensor weight = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  Tensor half = Tensor::from<float>({0.5f, -1}, {2}, DType::f16);
  double scale = 0.1;
  std::int64_t steps = 7;
  std::string level = "O2";
  int loads = 0;

  StateDict state_dict() const override {
    StateDict layer, state;
    layer.set("weight", weight);
    layer.set("half", half);
    state.set("layer", layer);
    state.set("empty", StateDict{});
    state.set("scale", scale);
    state.set("steps", steps);
    state.set("level", level);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    const Tensor& saved = state.dict("layer").tensor("weight");
    if (!(saved.shape() == weight.shape())) {
      core::fail<core::DataError>("small", "expected layer.weight ", weight.shape(), ", got ",
                                  saved.shape());
    }
    const std::int64_t new_steps = state.integer("steps");
    scale = state.number("scale");
    level = state.text("level");
    steps = new_steps;
    core::copy_bytes(saved, weight);
    core::copy_bytes(state.dict("layer").tensor("half"), half);
    ++loads;
  }
  void change(float value) {
    weight = Tensor::full({2, 3}, value);
    scale = value / 3;
    steps = static_cast<std::int64_t>(value) * 1000000007;
    level = "level " + std::to_string(value);
  }
  SmallState copy() const {  // with memory of its own
    SmallState other = *this;
    other.weight = Tensor::empty_like(weight);
    other.half = Tensor::empty_like(half);
    core::copy_bytes(weight, other.weight);
    core::copy_bytes(half, other.half);
    return other;
  }
  bool operator==(const SmallState& other) const {
    return weight.to_vector() == other.weight.to_vector() &&
           half.to_vector() == other.half.to_vector() && scale == other.scale &&
           steps == other.steps && level == other.level;
  }
};

}  // namespace cairn::checkpointing
