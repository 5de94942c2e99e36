// Tensors as text: nested brackets, abridged from kThreshold elements on to the first and last
// kEdge of each dimension.
#include <iomanip>
#include <ostream>
#include <sstream>

#include "element.h"
#include "host_view.h"

namespace cairn::core {

namespace {

constexpr std::int64_t kThreshold = 200;
constexpr std::int64_t kEdge = 3;

std::string element_text(const TensorView& scalar) {
  std::ostringstream out;
  out << std::setprecision(5) << std::boolalpha;
  dispatch_all(scalar.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T x = *scalar.as<T>();
    if constexpr (std::is_same_v<T, std::uint8_t>) {
      out << static_cast<int>(x);
    } else if constexpr (is_half_type<T>) {
      out << convert<float>(x);
    } else {
      out << x;
    }
  });
  return out.str();
}

void print_values(std::ostream& out, const TensorView& view, bool abridge, int depth) {
  if (view.dims() == 0) {
    out << element_text(view);
    return;
  }
  const std::string separator =
      view.dims() == 1 ? ", " : ",\n" + std::string(static_cast<std::size_t>(depth) + 1, ' ');
  const std::int64_t n = view.size(0);
  out << '[';
  for (std::int64_t i = 0; i < n; ++i) {
    if (i > 0) out << separator;
    if (abridge && n > 2 * kEdge && i == kEdge) {
      out << "..." << separator;
      i = n - kEdge;
    }
    print_values(out, view.select(0, i), abridge, depth + 1);
  }
  out << ']';
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  if (!tensor.defined()) return out << "Tensor (undefined)";
  const HostView host(tensor.view());
  print_values(out, host.view(), tensor.numel() > kThreshold, 0);
  return out << " " << tensor.shape() << ' ' << tensor.dtype() << ' ' << tensor.device();
}

}  // namespace cairn::core
