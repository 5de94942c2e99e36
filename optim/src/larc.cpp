#include "cairn/optim/larc.h"

#include <cmath>

#include "cairn/core/error.h"

namespace cairn::optim {

LARC::LARC(Optimizer& optimizer, const LarcOptions& options) : optimizer_(&optimizer) {
  const auto is_valid = [](double x) { return x >= 0 && std::isfinite(x); };
  CAIRN_CHECK(is_valid(options.trust_coefficient) && is_valid(options.eps), "LARC",
              "expected a trust coefficient and an eps >= 0, got ", options.trust_coefficient,
              " and ", options.eps);
  optimizer.check_not_moved();
  CAIRN_CHECK(!optimizer.larc_, "LARC", "expected an optimizer without LARC, got one with it");
  CAIRN_CHECK(!optimizer.running_norm_type() && optimizer.own_max_norm() == 0, "LARC",
              "expected an optimizer that does not look at gradient norms itself, got ",
              optimizer.kind());
  if (optimizer.capturable()) {
    core::fail<core::Unsupported>("LARC",
                                  "expected an optimizer that is not capturable, got one that "
                                  "is (the host reads LARC's norms: set_capturable(false))");
  }
  optimizer.larc_ = std::make_shared<const LarcOptions>(options);
}

const LarcOptions& LARC::options() const {
  optimizer_->check_not_moved();
  return *optimizer_->larc_;
}

LARC::~LARC() {
  optimizer_->larc_ = nullptr;
}

}  // namespace cairn::optim
