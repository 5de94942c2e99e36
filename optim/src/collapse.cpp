#include "cairn/optim/collapse.h"

#include <algorithm>
#include <iterator>

#include "cairn/core/text_table.h"

namespace cairn::optim {

void SkipStreak::add(std::vector<std::string> parameters) {
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  if (length_++ == 0) {
    parameters_ = std::move(parameters);
    return;
  }
  std::vector<std::string> common;
  std::set_intersection(parameters_.begin(), parameters_.end(), parameters.begin(),
                        parameters.end(), std::back_inserter(common));
  parameters_ = std::move(common);
}

void SkipStreak::set(int length, std::vector<std::string> parameters) {
  length_ = length;
  parameters_ = std::move(parameters);
}

std::string SkipStreak::describe() const {
  constexpr std::ptrdiff_t kShown = 8;
  if (parameters_.empty()) return "a different one each time";
  const std::ptrdiff_t more = std::ssize(parameters_) - kShown;
  if (more <= 0) return core::joined(parameters_);
  const auto begin = parameters_.begin();
  return core::str(core::joined({begin, begin + kShown}), " and ", more, " more");
}

}  // namespace cairn::optim
