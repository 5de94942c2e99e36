#include "cairn/amp/anomaly.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <sstream>

#include "cairn/core/text_table.h"

namespace cairn::amp {

using autograd::OpEvent;
using autograd::Phase;

namespace {

ValueRange measure(const Tensor& tensor, int index) {
  ValueRange range{index, tensor.dtype(), tensor.shape()};
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double x : tensor.to_vector()) {
    if (std::isnan(x)) {
      ++range.nan;
    } else if (std::isinf(x)) {
      ++range.inf;
    } else {
      low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  if (low <= high) range.min = low, range.max = high;
  return range;
}

std::vector<ValueRange> measure_all(std::span<const Tensor> tensors) {
  std::vector<ValueRange> ranges;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    if (!x.defined() || !core::is_floating(x.dtype())) continue;
    ranges.push_back(measure(x, static_cast<int>(i)));
  }
  return ranges;
}

/// Null where all are finite.
const ValueRange* first_bad(const std::vector<ValueRange>& ranges) {
  const auto bad = std::find_if_not(ranges.begin(), ranges.end(), std::mem_fn(&ValueRange::finite));
  return bad == ranges.end() ? nullptr : &*bad;
}

// "block.fc" of "block.fc.weight".
std::string module_of(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == parameter.npos ? parameter : parameter.substr(0, dot);
}

std::string bad_values(const ValueRange& range) {
  std::string text;
  if (range.inf > 0) text += core::str(range.inf, " inf");
  if (range.nan > 0) text += core::str(text.empty() ? "" : ", ", range.nan, " NaN");
  return text.empty() ? "-" : text;
}

std::string short_number(double value) {
  std::ostringstream out;
  out.precision(4);
  out << value;
  return out.str();
}

void add_rows(core::TextTable& table, const MeasuredOp& op) {
  for (const ValueRange& range : op.results) {
    const bool some = range.nan + range.inf < range.shape.numel();
    table.add({op.op, name(op.phase), op.parameters.empty() ? "-" : core::joined(op.parameters),
               core::str(range.dtype), core::str(range.shape), some ? short_number(range.min) : "-",
               some ? short_number(range.max) : "-", bad_values(range)});
  }
}

}  // namespace

std::string Anomaly::headline() const {
  const ValueRange& bad = *first_bad(op.results);
  const bool backward = op.phase == Phase::backward;
  std::ostringstream out;
  out << (backward ? "the backward of " : "") << op.op;
  if (!op.parameters.empty()) out << " (" << core::joined(op.parameters) << ")";
  if (op.phase == Phase::recompute) out << ", recomputed,";
  if (op.parameters.empty() && !after.empty()) out << " after " << after;
  out << " made " << bad_values(bad) << " of " << bad.shape.numel() << " values " << bad.dtype;
  if (backward) out << " in the gradient of input " << bad.index;
  for (const ValueRange& input : inputs) {
    if (input.finite()) continue;
    out << "; its " << (backward ? "incoming gradient" : core::str("input ", input.index))
        << " held " << bad_values(input) << " already";
  }
  return out.str();
}

std::string Anomaly::describe() const {
  core::TextTable table(
      {"operation", "phase", "parameters", "dtype", "shape", "min", "max", "not finite"}, {5, 6});
  for (const MeasuredOp& earlier : before) add_rows(table, earlier);
  add_rows(table, op);
  std::ostringstream out;
  out << headline() << "\nits inputs:";
  for (const ValueRange& input : inputs) {
    out << "\n  " << input.index << ": " << input.dtype << " " << input.shape << " in "
        << short_number(input.min) << " .. " << short_number(input.max);
    if (!input.finite()) out << ", " << bad_values(input);
  }
  out << "\nthe last results, oldest first:\n" << table.str();
  return out.str();
}

AnomalyError::AnomalyError(Anomaly anomaly)
    : Error("[anomaly] expected finite values; " + anomaly.describe()),
      anomaly_(std::move(anomaly)) {}

void AnomalyMode::clear() {
  first_.reset();
  history_.clear();
  last_module_.clear();
}

void AnomalyMode::on_end(const OpEvent& event) {
  if (first_ && !options_.throws) return;
  MeasuredOp measured{event.name, event.phase};
  for (const Tensor& parameter : event.parameters) {
    if (!parameter.name().empty()) measured.parameters.push_back(parameter.name());
  }
  measured.results = measure_all(event.outputs);
  const auto& ignored = options_.ignore;
  const bool expected = std::count(ignored.begin(), ignored.end(), measured.op) > 0;
  if (!expected && first_bad(measured.results) != nullptr) {
    Anomaly anomaly{std::move(measured),
                    measure_all(event.inputs),
                    last_module_,
                    {history_.begin(), history_.end()}};
    if (!first_) first_ = anomaly;
    if (options_.throws) throw AnomalyError(std::move(anomaly));
    return;
  }
  if (!measured.parameters.empty()) last_module_ = module_of(measured.parameters[0]);
  history_.push_back(std::move(measured));
  if (history_.size() > options_.history) history_.pop_front();
}

}  // namespace cairn::amp
