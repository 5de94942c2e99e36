#include "cairn/amp/overflow.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <set>
#include <sstream>

#include "overflow_agreement.h"

namespace cairn::amp {

namespace {

const char* kind_of(const Culprit& culprit) {
  if (culprit.inf > 0 && culprit.nan > 0) return "inf and NaN";
  return culprit.nan > 0 ? "NaN" : "inf";
}

/// "", " on rank 2", " on ranks 0 and 2", " on every rank".
std::string ranks_of(const Overflow& overflow, const std::string& parameter, int world_size) {
  if (world_size == 1) return {};
  std::vector<int> ranks;
  for (const Culprit& culprit : overflow.culprits) {
    if (culprit.parameter == parameter) ranks.push_back(culprit.rank);
  }
  if (ranks.front() == kSumOfRanks) return " in the sum over ranks";
  if (static_cast<int>(ranks.size()) == world_size) return " on every rank";
  std::string text = ranks.size() == 1 ? " on rank " : " on ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

std::string number(double value) {
  if (value == std::floor(value) && std::abs(value) < 0x1p53) {
    return std::to_string(static_cast<long long>(value));
  }
  return core::str(value);
}

std::string Overflow::describe(int world_size) const {
  if (culprits.empty()) return "a gradient that is not finite";
  const Culprit& first = culprits.front();
  const std::int64_t count = first.inf + first.nan;
  std::set<std::string> parameters;
  for (const Culprit& culprit : culprits) parameters.insert(culprit.parameter);
  const std::size_t others = parameters.size() - 1;
  std::string text = core::str(kind_of(first), " in the gradient of ", first.parameter, " (", count,
                               count == 1 ? " element)" : " elements)",
                               ranks_of(*this, first.parameter, world_size));
  if (others > 0) text += core::str(", and ", others, " more parameter", others == 1 ? "" : "s");
  return text;
}

std::string overflow_report(const std::vector<Overflow>& overflows, int world_size) {
  if (overflows.empty()) return "no overflows\n";
  std::ostringstream out;
  out << std::setw(8) << "step" << std::setw(6) << "loss" << std::setw(12) << "scale"
      << "  what\n";
  for (const Overflow& overflow : overflows) {
    out << std::setw(8) << overflow.step << std::setw(6) << overflow.loss_id << std::setw(12)
        << number(overflow.loss_scale) << "  " << overflow.describe(world_size) << '\n';
  }
  return out.str();
}

}  // namespace cairn::amp
