// Names the first operation whose result is not finite, forward or backward.
//
//   amp::AnomalyMode anomaly;                              // watches this thread from here on
//   train_step();                                          // throws AnomalyError where one appears
//
// or, to go on and keep the first:
//
//   amp::AnomalyMode anomaly({.throws = false});
//   train_step();
//   if (anomaly.first()) log::warn("{}", anomaly.first()->describe());
//
// For finding a fault, not for training: every result is read on the host (it waits for the device)
// and measured. A dynamic loss scale overflows now and then by design: look at the operations that
// it names while the scale is at its minimum, or at scale 1.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/core/error.h"

namespace cairn::amp {

/// One floating tensor, measured.
struct ValueRange {
  int index = 0;  // which input or result; backward: which input's gradient
  DType dtype = DType::f32;
  Shape shape;
  double min = 0.0, max = 0.0;  // of the finite values; both 0 where there are none
  std::int64_t nan = 0, inf = 0;
  bool finite() const { return nan == 0 && inf == 0; }
};

struct MeasuredOp {
  std::string op;
  autograd::Phase phase = autograd::Phase::forward;
  std::vector<std::string> parameters;  // "block.fc.weight"
  std::vector<ValueRange> results;      // backward: the gradients that it made
};

struct Anomaly {
  MeasuredOp op;
  std::vector<ValueRange> inputs;  // of the operation, before casts; backward: of dy
  std::string after;               // the last module before it: "block.fc"; may be empty
  std::vector<MeasuredOp> before;  // oldest first

  std::string headline() const;  // one line
  std::string describe() const;  // the headline, and a table of the ranges
};

class AnomalyError : public core::Error {
 public:
  explicit AnomalyError(Anomaly anomaly);
  const Anomaly& anomaly() const { return anomaly_; }

 private:
  Anomaly anomaly_;
};

struct AnomalyOptions {
  bool throws = true;               // false: keep the first, and go on
  std::size_t history = 8;          // operations before it whose ranges are told
  std::vector<std::string> ignore;  // operations that may make inf, by name
};

class [[nodiscard]] AnomalyMode : private autograd::ScopedObserver {
 public:
  explicit AnomalyMode(AnomalyOptions options = {}) : options_(std::move(options)) {}
  const std::optional<Anomaly>& first() const { return first_; }
  /// Forgets the first and the operations before: what comes next counts.
  void clear();

 private:
  void on_end(const autograd::OpEvent& event) override;

  AnomalyOptions options_;
  std::optional<Anomaly> first_;
  std::deque<MeasuredOp> history_;
  std::string last_module_;
};

}  // namespace cairn::amp
