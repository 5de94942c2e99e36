// Which lengths attention has plans of its own for. cuDNN compiles a plan's kernels for its
// lengths, so lengths that change from step to step share plans: behind the first few of a kind, a
// causal attention of a sequence to itself is given rows of zeros up to the end of its class
// (shape_class.h). No query of its own sees those keys; those queries' gradients are zero, and so
// are their parts in the gradients of keys.
//
// Lengths that are a whole class, and the first eight others, are taken as they are. A resumed run
// knows from the saved choices which those were.
#pragma once

#include <compare>
#include <optional>
#include <string>

#include "cuda/queue.h"

namespace cairn::kernels::cuda {

/// What plans of attention depend on besides lengths, batch and strides.
struct SdpaKind {
  int device = 0;
  bool backward = false, causal = false;
  DType dtype = DType::f16;
  std::int64_t heads = 0, key_heads = 0, columns = 0;

  auto operator<=>(const SdpaKind&) const = default;
};

struct SdpaLengths {
  std::int64_t queries = 0, keys = 0;

  auto operator<=>(const SdpaLengths&) const = default;
};

/// All of a plan's name but batch and strides, without the device's number.
std::string sdpa_name(const SdpaKind& kind, const SdpaLengths& lengths);

/// Rows of zeros that queries and keys get behind their own. Nothing where cuDNN is not to be
/// asked: these lengths would need a plan of their own, and there are enough.
std::optional<std::int64_t> rows_of_zeros(const Queue& queue, const SdpaKind& kind,
                                          const SdpaLengths& lengths);

}  // namespace cairn::kernels::cuda
