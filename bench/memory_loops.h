// Loops that read and write what an optimizer update does and compute nothing: what the machine's
// memory allows in the same run.
#pragma once

#include <cstdint>
#include <functional>

namespace bench {

/// The bytes of each parameter in a pass. Arrays are as long as the list's parameters together.
enum class Bytes {
  adamw_f32,   // f32 gradient read; weight and two moments f32 read and written: 28
  o2,          // bf16 gradient read, alone (the check); then read again, f32 master and two f32
               // moments read and written, the bf16 weight written past the caches: 30
  o2_compact,  // as o2 with a bf16 weight, an i16 remainder and two bf16 moments, all read and
               // written: 20
  one_moment,  // bf16 gradient read, f32 master and one f32 moment read and written, bf16 weight
               // written past the caches: 20
  lamb,        // bf16 gradient and f32 master read, two f32 moments read and written: 22; then
               // both moments read, the master read and written, the bf16 weight written: 18
};

/// A run of such a loop over `parameters` elements, on memory of its own, by all OpenMP threads.
std::function<void()> memory_loop(Bytes bytes, std::int64_t parameters);

}  // namespace bench
