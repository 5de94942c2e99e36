#include "group/listing.h"

#include <sodium.h>

#include <algorithm>
#include <sstream>

#include "cairn/core/error.h"

namespace cairn::parallel {

std::string digest(std::string_view text) {
  std::string bytes(32, '\0');
  crypto_generichash(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size(), nullptr, 0);
  return bytes;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

bool all_equal(const std::vector<std::string>& texts) {
  return std::all_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text == texts[0]; });
}

void check_same_lists(std::string_view where, std::string_view what,
                      const std::vector<std::string>& of_rank) {
  const std::string end = "nothing more";
  for (std::size_t rank = 1; rank < of_rank.size(); ++rank) {
    if (of_rank[rank] == of_rank[0]) continue;
    const auto a = lines_of(of_rank[0]), b = lines_of(of_rank[rank]);
    const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    core::fail(where, "expected the same ", what, " on every rank, got ", x == a.end() ? end : *x,
               " on rank 0 and ", y == b.end() ? end : *y, " on rank ", rank);
  }
}

}  // namespace cairn::parallel
