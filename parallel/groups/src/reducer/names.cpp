#include "reducer/names.h"

#include <algorithm>

#include "cairn/core/error.h"

namespace cairn::parallel {

std::string join_names(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i)
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  return names.size() <= kMost ? text : core::str(text, " and ", names.size() - kMost, " more");
}

std::string of_losses(const std::string& losses, const std::string& name) {
  return losses.empty() ? name : losses + ": " + name;
}

}  // namespace cairn::parallel
