#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>

#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"

namespace cairn::tools {

namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

// "" where the two are equal bit for bit; `largest` grows to the largest distance of two numbers.
std::string compare_tensors(const Tensor& a, const Tensor& b, double& largest) {
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape())) {
    return core::str(a.dtype(), " ", a.shape(), " and ", b.dtype(), " ", b.shape());
  }
  const bool plain = a.is_contiguous() && b.is_contiguous();
  if (a.nbytes() == 0 || (plain && std::memcmp(a.raw_data(), b.raw_data(), a.nbytes()) == 0)) {
    return "";
  }
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  std::size_t differing = 0, first = x.size();
  double here = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (same_bits(x[i], y[i])) continue;
    ++differing;
    first = std::min(first, i);
    const double distance = std::fabs(x[i] - y[i]);
    if (!(distance <= here)) here = distance;
  }
  if (differing == 0 && !plain) return "";
  if (differing == 0)
    return "the same numbers in other bits (NaN payloads, or integers beyond 2^53)";
  if (!(here <= largest)) largest = here;
  return core::str(differing, " of ", x.size(), " elements differ, by at most ", here,
                   "; first at ", first, ": ", x[first], " and ", y[first]);
}

std::string compare_values(const StateDict::Value& a, const StateDict::Value& b, double& largest) {
  if (a.index() != b.index()) return "of different kinds";
  if (const auto* tensor = std::get_if<Tensor>(&a)) {
    return compare_tensors(*tensor, std::get<Tensor>(b), largest);
  }
  std::ostringstream text;
  text << std::setprecision(17);
  if (const auto* number = std::get_if<double>(&a)) {
    const double other = std::get<double>(b);
    if (!same_bits(*number, other)) text << *number << " and " << other;
    if (!(std::fabs(*number - other) <= largest)) largest = std::fabs(*number - other);
  } else if (const auto* integer = std::get_if<std::int64_t>(&a)) {
    const std::int64_t other = std::get<std::int64_t>(b);
    if (*integer != other) text << *integer << " and " << other;
  } else if (const auto* words = std::get_if<std::string>(&a)) {
    const std::string& other = std::get<std::string>(b);
    if (*words != other) text << '"' << printable(*words) << "\" and \"" << printable(other) << '"';
  }
  return text.str();
}

}  // namespace

Differences compare(const Contents& a, const Contents& b, const std::string& name_of_a,
                    const std::string& name_of_b) {
  std::map<std::string, const StateDict::Value*> unmatched;
  for (const auto& [name, value] : b) unmatched[name] = &value;
  Differences all;
  const auto report = [&](const std::string& name, const std::string& what) {
    if (all.lines.empty()) all.first = name;
    all.lines.push_back(printable(name) + ": " + what);
  };
  for (const auto& [name, value] : a) {
    const auto found = unmatched.find(name);
    if (found == unmatched.end()) {
      report(name, "only in " + name_of_a);
      continue;
    }
    const double before = all.largest;
    const std::string what = compare_values(value, *found->second, all.largest);
    if (!what.empty()) report(name, what);
    if (std::bit_cast<std::uint64_t>(all.largest) != std::bit_cast<std::uint64_t>(before)) {
      all.largest_of = name;
    }
    unmatched.erase(found);
  }
  for (const auto& [name, value] : b) {
    if (unmatched.contains(name)) report(name, "only in " + name_of_b);
  }
  all.entries = a.size() + unmatched.size();
  return all;
}

int diff(const std::string& a, const std::string& b) {
  const Differences all =
      compare(read_contents(stores_of(a).front()), read_contents(stores_of(b).front()), a, b);
  for (const std::string& line : all.lines) std::cout << line << '\n';
  if (all.lines.empty()) {
    std::cout << "equal: " << all.entries << " entries, bit for bit\n";
    return 0;
  }
  std::cout << all.lines.size() << " of " << all.entries << " entries differ; first "
            << printable(all.first);
  if (!all.largest_of.empty()) {
    std::cout << "; largest difference " << all.largest << " in " << printable(all.largest_of);
  }
  std::cout << '\n';
  return 1;
}

}  // namespace cairn::tools
