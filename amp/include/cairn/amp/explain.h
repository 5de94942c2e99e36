// Why each operation ran in the precision it ran in, what the casts cost, and why half is not
// faster.
//
//   amp::Explain explain;                                  // watches this thread from here on
//   for (int i = 0; i < 3; ++i, explain.step()) train_step();
//   std::cout << explain.report().table();
//
// Watching costs host time per operation and no device time: nothing is read back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/autograd/observer.h"

namespace cairn::amp {

/// Operations of one name, phase, dtype and reason. Sums over all steps.
struct ExplainRow {
  std::string op;
  autograd::Phase phase = autograd::Phase::forward;
  DType dtype = DType::f32;  // computed in; backward: of the gradient that came in
  std::string why;           // "half: matrix product", "promote: widest of f16, f32", ...
  std::int64_t count = 0;
  std::int64_t casts = 0;        // inputs converted for it
  std::int64_t bytes_cast = 0;   // that those conversions wrote
  std::int64_t cache_hits = 0;   // inputs whose half copy was there already
  std::int64_t products = 0;     // matrix products and convolutions, forward and recompute only
  std::int64_t tensor_core = 0;  // of those: in half, and every size a multiple of 8
};

/// A product that tensor cores run slowly or not at all.
struct ExplainMisfit {
  std::string op;
  std::string where;   // its parameter, "block.fc.weight"; may be empty
  std::string reason;  // "runs in f32", "K 30, N 10 are no multiples of 8"
  std::int64_t count = 0;
};

struct ExplainReport {
  std::int64_t steps = 0;                  // as told by step(); at least 1
  std::vector<ExplainRow> rows;            // in the order they were first seen
  std::vector<ExplainMisfit> misfits;      // the first 32 kinds
  std::int64_t casts = 0, bytes_cast = 0;  // all conversions, explicit and backward ones too
  std::int64_t cache_hits = 0;
  std::int64_t products = 0, tensor_core = 0;

  std::string table() const;  // for people, per step
  std::string json() const;   // the fields above, sums over all steps
};

class [[nodiscard]] Explain : private autograd::ScopedObserver {
 public:
  /// Ends a step: the report divides by their number.
  void step() { ++sums_.steps; }
  ExplainReport report() const;

 private:
  void on_end(const autograd::OpEvent& event) override;
  ExplainRow& row_of(const autograd::OpEvent& event);
  void check_product(const autograd::OpEvent& event, ExplainRow& row);

  ExplainReport sums_;
};

}  // namespace cairn::amp
