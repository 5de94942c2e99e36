#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/adagrad.h"

namespace cairn::optim {

FusedAdagrad::FusedAdagrad(NamedTensors parameters, const AdagradOptions& options)
    : FusedAdagrad({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedAdagrad::FusedAdagrad(std::vector<ParameterGroup> groups, const AdagradOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  for (const double value : {options.eps, options.lr_decay, options.initial_accumulator}) {
    CAIRN_CHECK(value >= 0 && std::isfinite(value), "FusedAdagrad",
                "expected eps, lr_decay and initial_accumulator >= 0, got ", value);
  }
}

void FusedAdagrad::update_entries(const ParameterGroup& group,
                                  const std::vector<kernels::UpdateEntry>& entries,
                                  double gradient_scale, std::int64_t step) {
  kernels::AdagradOptions options;
  options.lr = group.lr / (1.0 + static_cast<double>(step - 1) * options_.lr_decay);
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.adagrad_w = options_.adagrad_w;
  options.gradient_scale = gradient_scale;
  kernels::adagrad_update(entries, options);
}

}  // namespace cairn::optim
