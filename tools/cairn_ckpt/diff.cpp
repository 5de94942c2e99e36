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

std::string compare_tensors(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape())) {
    return core::str(a.dtype(), " ", a.shape(), " and ", b.dtype(), " ", b.shape());
  }
  if (a.nbytes() == 0 || std::memcmp(a.raw_data(), b.raw_data(), a.nbytes()) == 0) return "";
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  std::size_t differing = 0, first = x.size();
  double largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (same_bits(x[i], y[i])) continue;
    ++differing;
    first = std::min(first, i);
    const double distance = std::fabs(x[i] - y[i]);
    if (!(distance <= largest)) largest = distance;
  }
  if (differing == 0)
    return "the same numbers in other bits (NaN payloads, or integers beyond 2^53)";
  return core::str(differing, " of ", x.size(), " elements differ, by at most ", largest,
                   "; first at ", first, ": ", x[first], " and ", y[first]);
}

// "" where the two are equal bit for bit.
std::string compare(const StateDict::Value& a, const StateDict::Value& b) {
  if (a.index() != b.index()) return "of different kinds";
  if (const auto* tensor = std::get_if<Tensor>(&a)) {
    return compare_tensors(*tensor, std::get<Tensor>(b));
  }
  std::ostringstream text;
  text << std::setprecision(17);
  if (const auto* number = std::get_if<double>(&a)) {
    const double other = std::get<double>(b);
    if (!same_bits(*number, other)) text << *number << " and " << other;
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

int diff(const std::string& a, const std::string& b) {
  const Contents left = read_contents(stores_of(a).front());
  const Contents right = read_contents(stores_of(b).front());
  std::map<std::string, const StateDict::Value*> unmatched;
  for (const auto& [name, value] : right) unmatched[name] = &value;
  std::size_t differences = 0;
  const auto report = [&](const std::string& name, const std::string& what) {
    std::cout << printable(name) << ": " << what << '\n';
    ++differences;
  };
  for (const auto& [name, value] : left) {
    const auto found = unmatched.find(name);
    if (found == unmatched.end()) {
      report(name, "only in " + a);
      continue;
    }
    const std::string what = compare(value, *found->second);
    if (!what.empty()) report(name, what);
    unmatched.erase(found);
  }
  for (const auto& [name, value] : right) {
    if (unmatched.contains(name)) report(name, "only in " + b);
  }
  if (differences == 0) {
    std::cout << "equal: " << left.size() << " entries, bit for bit\n";
    return 0;
  }
  std::cout << differences << " of " << left.size() + unmatched.size() << " entries differ\n";
  return 1;
}

}  // namespace cairn::tools
