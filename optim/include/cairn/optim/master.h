// The true value of a half parameter, kept beside it (core::GradMeta): as an f32 master (4 bytes an
// element), or, of a bf16 parameter, as the 16 bits that its f32 value has more (2 bytes). Both are
// exact; files and copies hold the f32 value.
#pragma once

#include <cstdint>

#include "cairn/core/tensor.h"

namespace cairn::optim {

enum class MasterStorage : std::uint8_t { f32, remainder };

/// Gives a half parameter its exact value (f32, of its shape): the parameter becomes the rounded
/// one. With f32 storage the memory of `exact` is taken over where nobody else uses it and it is
/// laid out like the parameter. Remainders round halves away from zero, masters to even.
/// Throws InvalidArgument, with the parameter's name, for a parameter that is not half, or for a
/// remainder of an f16 one.
void set_master(const Tensor& parameter, Tensor exact, MasterStorage storage = MasterStorage::f32);

/// f32: the master (sharing its memory), weight and remainder put together, or the parameter itself
/// (widened where it is half).
Tensor master_value(const Tensor& parameter);

}  // namespace cairn::optim
