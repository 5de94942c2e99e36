#include "cairn/kernels/multi_tensor.h"

#include "launch.h"
#include "list_check.h"

namespace cairn::kernels {

GradientCheck check_gradients(const std::vector<TensorView>& gradients, bool per_tensor_norms) {
  if (gradients.empty()) return {};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    CAIRN_CHECK(gradients[i].defined(), "check_gradients", "expected a defined gradient ", i);
    CAIRN_CHECK(gradients[i].device == gradients[0].device, "check_gradients",
                "expected all gradients on ", gradients[0].device, ", got gradient ", i, " on ",
                gradients[i].device);
    check_list_dtype("check_gradients", "gradient", i, gradients[i]);
    check_dense("check_gradients", "gradient", i, gradients[i]);
  }
  return launch_and_wait(gradients[0].device, [&](const Backend& backend) {
    return backend.check_gradients(gradients, per_tensor_norms);
  });
}

}  // namespace cairn::kernels
