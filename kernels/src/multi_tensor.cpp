#include "cairn/kernels/multi_tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "cairn/kernels/passing_lists.h"
#include "list_check.h"
#include "math/power_sum.h"
#include "pending_check.h"

namespace cairn::kernels {

namespace {

void check_power(const char* op, double p) {
  CAIRN_CHECK(p >= 1.0, op, "expected p >= 1 (infinity: the largest element), got ", p);
}

PendingCheck launch_check(const std::vector<TensorView>& tensors, double p) {
  if (tensors.empty()) return {};
  return pending_check(tensors[0].device, tensors.size(),
                       [=](const Backend& backend, TensorCheck* checks) {
                         backend.check_tensors(tensors, p, checks);
                       });
}

PendingCheck launch_linear(LinearLists lists) {
  if (lists.x.empty()) return {};
  for (const TensorView& out : lists.out) wrote(out);
  const Device device = lists.x[0].device;
  const std::size_t count = lists.x.size();
  return pending_check(device, count,
                       [lists = std::move(lists)](const Backend& backend, TensorCheck* checks) {
                         backend.multi_tensor_linear(lists, checks);
                       });
}

std::vector<TensorCheck> decoded(const std::vector<std::uint64_t>& words) {
  std::vector<TensorCheck> checks;
  for (std::size_t i = 0; i + kCheckWords <= words.size(); i += kCheckWords) {
    checks.push_back({std::bit_cast<double>(words[i]), static_cast<std::int64_t>(words[i + 1]),
                      static_cast<std::int64_t>(words[i + 2])});
  }
  return checks;
}

PassingLists*& innermost_lists() {
  thread_local PassingLists* innermost = nullptr;
  return innermost;
}

/// inf and NaN count as they do in a sum of all elements.
double scaled_norm(const TensorCheck& check, double scale) {
  using Limits = std::numeric_limits<double>;
  const double norm = check.nan > 0         ? Limits::quiet_NaN()
                      : check.nonfinite > 0 ? Limits::infinity()
                                            : std::sqrt(check.power_sum);
  return norm * std::abs(scale);
}

}  // namespace

PassingLists::PassingLists() : before_(std::exchange(innermost_lists(), this)) {}

PassingLists::~PassingLists() {
  innermost_lists() = before_;
}

std::shared_ptr<void>* PassingLists::kept() {
  PassingLists* const scope = innermost_lists();
  return scope == nullptr ? nullptr : &scope->kept_;
}

std::size_t PendingCheck::size() const {
  return impl_ ? impl_->result.size() / kCheckWords : 0;
}

std::vector<TensorCheck> PendingCheck::read() const {
  return read({*this}).front();
}

std::vector<std::vector<TensorCheck>> PendingCheck::read(const std::vector<PendingCheck>& checks) {
  std::vector<PendingResult> results;
  results.reserve(checks.size());
  for (const PendingCheck& check : checks) {
    results.push_back(check.impl_ ? check.impl_->result : PendingResult());
  }
  PendingResult::fetch(results);
  std::vector<std::vector<TensorCheck>> found;
  found.reserve(results.size());
  for (const PendingResult& result : results) found.push_back(decoded(result.host()));
  return found;
}

PendingCheck check_tensors(const std::vector<TensorView>& tensors, double p) {
  check_power("check_tensors", p);
  check_float_list("check_tensors", "tensor", tensors);
  return launch_check(tensors, p);
}

std::vector<core::ElementRange> pieces_of(core::ElementRange part, std::int64_t numel) {
  std::vector<core::ElementRange> pieces;
  for (std::int64_t at = part.begin; at < part.end; at = pieces.back().end) {
    const std::int64_t chunk_end = std::min(numel, at / kSumChunk * kSumChunk + kSumChunk);
    const bool whole = at % kSumChunk == 0 && chunk_end <= part.end;
    pieces.push_back({at, whole ? chunk_end : std::min({part.end, chunk_end, at + kSumBlock})});
  }
  return pieces;
}

TensorCheck join_pieces(std::span<const CheckedPiece> pieces, double p) {
  const JoinParts<PowerSum> join{PowerSum(p)};
  CheckPart total{0.0, 0, 0}, chunk{0.0, 0, 0};
  std::int64_t at = 0;
  for (const auto& [elements, check] : pieces) {
    CAIRN_CHECK(elements.begin == at, "join_pieces", "expected a piece from element ", at,
                " on, got one from ", elements.begin, " on");
    at = elements.end;
    if (elements.begin % kSumChunk == 0) {
      total = join(total, chunk);
      chunk = {0.0, 0, 0};
    }
    chunk = join(chunk, {check.power_sum, check.nonfinite, check.nan});
  }
  total = join(total, chunk);
  return {total.power_sum, total.nonfinite, total.nan};
}

double norm_of(const std::vector<TensorCheck>& checks, double p) {
  check_power("norm_of", p);
  const PowerSum power(p);
  double total = 0.0;
  for (const TensorCheck& check : checks) total = power.join(total, check.power_sum);
  switch (power.kind()) {
    case PowerSum::Kind::squares:
      return std::sqrt(total);
    case PowerSum::Kind::powers:
      return std::pow(total, 1.0 / p);
    default:
      return total;
  }
}

Norms multi_tensor_l2norm(const std::vector<TensorView>& x, bool per_tensor, double scale) {
  check_float_list("multi_tensor_l2norm", "tensor", x);
  TensorCheck all;
  Norms norms;
  for (const TensorCheck& check : launch_check(x, 2.0).read()) {
    all = {all.power_sum + check.power_sum, all.nonfinite + check.nonfinite, all.nan + check.nan};
    if (per_tensor) norms.per_tensor.push_back(scaled_norm(check, scale));
  }
  norms.norm = scaled_norm(all, scale);
  norms.finite = all.nonfinite == 0;
  return norms;
}

PendingCheck multi_tensor_scale(const std::vector<TensorView>& in,
                                const std::vector<TensorView>& out, double scale) {
  check_float_list("multi_tensor_scale", "in", in);
  check_partner_list("multi_tensor_scale", "out", out, "in", in);
  return launch_linear({scale, 0.0, in, {}, out, true, false});
}

PendingCheck multi_tensor_axpby(double a, const std::vector<TensorView>& x, double b,
                                const std::vector<TensorView>& y,
                                const std::vector<TensorView>& out, CheckedArgument checked) {
  check_float_list("multi_tensor_axpby", "x", x);
  check_partner_list("multi_tensor_axpby", "y", y, "x", x);
  check_partner_list("multi_tensor_axpby", "out", out, "x", x);
  check_partner_list("multi_tensor_axpby", "out", out, "y", y);
  return launch_linear(
      {a, b, x, y, out, checked != CheckedArgument::y, checked != CheckedArgument::x});
}

std::int64_t host_reads() {
  return count_of_fetches();
}

}  // namespace cairn::kernels
