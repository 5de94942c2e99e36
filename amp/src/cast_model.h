// What an opt level does to one model, and how it is undone.
#pragma once

#include <functional>
#include <unordered_map>

#include "cairn/amp/options.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/nn/module.h"

namespace cairn::amp {

/// Throws InvalidArgument where amp::initialize() does, and for a parameter that has a gradient.
void check_model(const nn::Module& model);

/// Of a model that was initialized: its layers are another module's now.
bool was_moved(const nn::Module& model);

/// A floating tensor in another dtype. Undefined and integer ones stay.
Tensor to_floating(const Tensor& x, DType dtype);

/// Points a parameter at its exact f32 value: its master, or the half value widened.
void widen_parameter(Tensor parameter);

/// Throws Unsupported where this rank has a part of a master only: the parameter cannot become f32.
void check_masters_whole(const NamedTensors& parameters, const char* what);

/// How each parameter's optimizer keeps its state, by Tensor::id().
using StatesOfParameters = std::unordered_map<const void*, optim::StateOptions>;

/// Casts the model and its forward. `in_region` says at each forward whether it runs in an autocast
/// region although the level has none (a layer fell back to f32).
void cast_model(nn::Module& model, const Options& options, const StatesOfParameters& states,
                std::function<bool()> in_region);
/// f32 values, no casts around forward.
void release_model(nn::Module& model);

}  // namespace cairn::amp
