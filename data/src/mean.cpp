#include "cairn/data/mean.h"

#include <cmath>

#include "cairn/core/error.h"

namespace cairn::data {

namespace {

double quotient(double sum, double weights, const char* where) {
  CAIRN_CHECK(weights > 0.0, "mean", "expected values to average ", where, ", got none");
  return sum / weights;
}

}  // namespace

void Mean::add(double value, double weight) {
  CAIRN_CHECK(std::isfinite(weight) && weight >= 0.0, "mean", "expected a finite weight >= 0, got ",
              weight);
  if (weight == 0.0) return;
  sum_ += value * weight;
  weights_ += weight;
}

double Mean::here() const {
  return quotient(sum_, weights_, "on this rank");
}

double Mean::over(const World& world, std::string_view name) const {
  const double sum = world.sum(sum_, name);
  return quotient(sum, world.sum(weights_, name), "on any rank");
}

}  // namespace cairn::data
