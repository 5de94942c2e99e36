// The routes of products and convolutions, and the choice among them (product_choices.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cairn/core/dtype.h"
#include "cpu/dnnl_operation.h"

namespace cairn::kernels {

/// How a product or convolution is computed.
struct Route {
  DType compute = DType::f32;  // the dtype multiplied in; sums are f32
  bool packed = false;         // operands are brought to the layout that the primitive likes best

  bool operator==(const Route&) const = default;
};
std::string name(const Route& route);  // "bf16_packed"

/// What a choice is made for.
struct ProductWork {
  onednn::Key key;                        // exact, to find the choice again quickly
  std::int64_t multiplications;           // few are not worth a timing
  std::function<std::string()> name;      // of the shape class
  std::vector<Route> routes;              // that can do it; the default first
  std::function<void(const Route&)> run;  // may be called any number of times
};

/// The route by the setting, the choices kept, or a timing of all of them with work.run.
Route choose(const ProductWork& work);

/// For names of shape classes: the nearest power of two.
std::int64_t rounded(std::int64_t size);

}  // namespace cairn::kernels
