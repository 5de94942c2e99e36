#include "reducer/names.h"

#include <algorithm>
#include <sstream>

#include "cairn/core/error.h"

namespace cairn::parallel {

std::string join_names(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i)
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  return names.size() <= kMost ? text : core::str(text, " and ", names.size() - kMost, " more");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string of_loss(const std::string& loss, const std::string& name) {
  return loss.empty() ? name : loss + ": " + name;
}

bool all_equal(const std::vector<std::string>& texts) {
  return std::all_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text == texts[0]; });
}

}  // namespace cairn::parallel
