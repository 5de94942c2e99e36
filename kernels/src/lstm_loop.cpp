#include "lstm_loop.h"

#include "temporary.h"

namespace cairn::kernels {

namespace {

// Step t leads from row before(t) of the states to row after(t).
struct Rows {
  bool reverse;

  std::int64_t before(std::int64_t t) const { return reverse ? t + 1 : t; }
  std::int64_t after(std::int64_t t) const { return reverse ? t : t + 1; }
};

}  // namespace

void lstm_loop(const Backend& backend, const StepProduct& times_weight, const TensorView& gates,
               const TensorView& h, const TensorView& c, const LstmOptions& options) {
  const std::int64_t T = gates.size(0);
  const Rows rows{options.reverse};
  const Temporary hidden = temporary({gates.size(1), gates.size(2)}, wide(h.dtype), h.device);
  const Temporary carry = temporary({h.size(1), h.size(2)}, wide(h.dtype), h.device);
  backend.copy(c.select(0, options.reverse ? T : 0), carry.view);
  for (std::int64_t i = 0; i < T; ++i) {
    const std::int64_t t = options.reverse ? T - 1 - i : i;
    const TensorView h_before = h.select(0, rows.before(t));
    times_weight(h_before, hidden.view);
    backend.lstm_cell(gates.select(0, t), hidden.view, carry.view, h_before,
                      h.select(0, rows.after(t)), c.select(0, rows.after(t)), {options.lengths, t});
  }
}

void lstm_backward_loop(const Backend& backend, const StepProduct& add_times_weight,
                        const TensorView& gates, const TensorView& c, const TensorView& dy,
                        const TensorView& dh, const TensorView& dc, const LstmOptions& options) {
  const std::int64_t T = gates.size(0);
  const Rows rows{options.reverse};
  for (std::int64_t i = 0; i < T; ++i) {
    const std::int64_t t = options.reverse ? i : T - 1 - i;
    const TensorView dgates = gates.select(0, t);
    backend.lstm_cell_backward(dgates, c.select(0, rows.before(t)), c.select(0, rows.after(t)),
                               dy.select(0, rows.after(t)), dh, dc, {options.lengths, t});
    add_times_weight(dgates, dh);
  }
}

}  // namespace cairn::kernels
