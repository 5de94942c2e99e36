#include "group/listing.h"

#include <sodium.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel {

std::string digest(std::string_view text) {
  std::string bytes(32, '\0');
  crypto_generichash(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size(), nullptr, 0);
  return bytes;
}

namespace {

std::vector<std::string> lines_and_end(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  lines.push_back("nothing more");
  return lines;
}

}  // namespace

void fail_at_difference(std::string_view where, std::string_view what,
                        const std::string& rank_zeros, const std::string& others,
                        std::size_t rank) {
  const auto a = lines_and_end(rank_zeros), b = lines_and_end(others);
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  core::fail(where, "expected the same ", what, " on every rank, got ",
             x == a.end() ? "nothing more" : *x, " on rank 0 and ",
             y == b.end() ? "nothing more" : *y, " on rank ", rank);
}

}  // namespace cairn::parallel
