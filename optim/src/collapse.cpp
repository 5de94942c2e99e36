#include "cairn/optim/collapse.h"

#include <algorithm>
#include <iterator>

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
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(parameters_.size(), kShown); ++i) {
    if (i > 0) text += ", ";
    text += parameters_[i];
  }
  if (parameters_.size() > kShown) text += core::str(" and ", parameters_.size() - kShown, " more");
  return text.empty() ? "a different one each time" : text;
}

}  // namespace cairn::optim
