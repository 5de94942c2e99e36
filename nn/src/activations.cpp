#include "cairn/nn/activations.h"

namespace cairn::nn {

Dropout::Dropout(double p) : p_(p) {
  CAIRN_CHECK(p >= 0.0 && p <= 1.0, "Dropout", "expected p in 0..1, got ", p);
  extra_ = core::str("p ", p);
}

}  // namespace cairn::nn
