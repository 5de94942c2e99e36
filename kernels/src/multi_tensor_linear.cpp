// multi_tensor_scale and multi_tensor_axpby.
#include "list_check.h"
#include "pending_check.h"

namespace cairn::kernels {

namespace {

PendingCheck launch_linear(LinearLists lists) {
  if (lists.x.empty()) return {};
  for (const TensorView& out : lists.out) wrote(out);
  const Device device = lists.x[0].device;
  const std::size_t count = lists.x.size();
  return pending_check(device, count,
                       [lists = std::move(lists)](const Backend& backend, TensorCheck* checks) {
                         backend.multi_tensor_linear(lists, checks);
                       });
}

}  // namespace

PendingCheck multi_tensor_scale(const std::vector<TensorView>& in,
                                const std::vector<TensorView>& out, double scale) {
  check_float_list("multi_tensor_scale", "in", in);
  check_partner_list("multi_tensor_scale", "out", out, "in", in);
  return launch_linear({scale, 0.0, in, {}, out, true, false});
}

PendingCheck multi_tensor_axpby(double a, const std::vector<TensorView>& x, double b,
                                const std::vector<TensorView>& y,
                                const std::vector<TensorView>& out, CheckedArgument checked) {
  check_float_list("multi_tensor_axpby", "x", x);
  check_partner_list("multi_tensor_axpby", "y", y, "x", x);
  check_partner_list("multi_tensor_axpby", "out", out, "x", x);
  check_partner_list("multi_tensor_axpby", "out", out, "y", y);
  return launch_linear(
      {a, b, x, y, out, checked != CheckedArgument::y, checked != CheckedArgument::x});
}

}  // namespace cairn::kernels
