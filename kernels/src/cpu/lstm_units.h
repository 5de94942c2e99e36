// A run of units of one sequence in one step, as the vector loops take it. The four gates of a unit
// lie `hidden_size` elements apart.
#pragma once

#include <cstdint>

#include "cairn/core/dtype.h"

namespace cairn::kernels {

struct LstmUnits {
  core::DType dtype;
  std::int64_t count, hidden_size;
  bool inside;  // of the sequence
  void* gates;
  const void* hidden;
  void* carry;
  const void* h_before;
  void* h;
  void* c;
};

struct LstmUnitsBackward {
  core::DType dtype;
  std::int64_t count, hidden_size;
  bool inside;
  void* gates;
  const void* c_before;
  const void* c;
  const void* dy;
  void* dh;
  void* dc;
};

}  // namespace cairn::kernels
