// Passes over many tensors at once: what is in them (finite? how large?), scaled copies and sums.
//
// The lists are pointer tables: slices of a gradient arena and tensors of a foreign trainer look
// the same. All tensors of a list are dense (their elements are visited in memory order), all on
// one device; empty lists and empty tensors are fine. One launch on CUDA for the whole list, on the
// current stream of the device; the memory of the tensors must stay until it has run. The update
// passes are in optimizer_update.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/core/tensor_view.h"

namespace cairn::kernels {

/// What one pass found in one tensor.
struct TensorCheck {
  double power_sum = 0.0;  // sum of x^2 (p = 2), of |x|^p, or the largest |x| (p = infinity); of
                           // the finite elements only
  std::int64_t nonfinite = 0;  // elements that are inf or NaN
  std::int64_t nan = 0;        // of these, NaN
};

/// A check that was launched and not read. What it found lies in device memory, which it owns,
/// until the host asks; copies share it. For one thread at a time.
class [[nodiscard]] PendingCheck {
 public:
  PendingCheck() = default;  // of no tensors

  std::size_t size() const;  // tensors
  /// Waits for the pass, where it has not been read before; in the order of the tensors. Rethrows
  /// the error of a CPU stream that failed before the pass.
  std::vector<TensorCheck> read() const;
  /// Several together: the host waits once per device.
  static std::vector<std::vector<TensorCheck>> read(const std::vector<PendingCheck>& checks);

  struct Impl;
  explicit PendingCheck(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Launches one pass over the tensors (f16, bf16, f32 in any mix) that sums |x|^p and counts what
/// is not finite, for every tensor. p >= 1; infinity: the largest |x|. At the speed of memory for p
/// of 1, 2 and infinity. Sums are f64, in a fixed order (the same bits in every run and on any
/// number of threads), and exact to f64 rounding; for p > 8 the powers of the largest floats
/// overflow to infinity. The norm of x * s is s times the norm of x: nothing needs to be unscaled
/// for it.
[[nodiscard]] PendingCheck check_tensors(const std::vector<TensorView>& tensors, double p = 2.0);

/// How a tensor's powers are summed: blocks of so many elements from its start each by itself, the
/// blocks of a chunk one after another, and the chunks one after another. Where a tensor lies on
/// several ranks, in parts that are cut between blocks, each checks the pieces_of() its part, and
/// join_pieces() of all have the bits of a check of the whole.
inline constexpr std::int64_t kSumBlock = core::kPartBlock, kSumChunk = 16 * kSumBlock;

/// Whole chunks, and blocks where the part begins or ends within one; in order.
std::vector<core::ElementRange> pieces_of(core::ElementRange part, std::int64_t numel);

struct CheckedPiece {
  core::ElementRange elements;  // of the whole
  TensorCheck check;            // with the same p
};
/// Pieces of one tensor, in order. Throws InvalidArgument where one does not follow the one before.
TensorCheck join_pieces(std::span<const CheckedPiece> pieces, double p = 2.0);

/// The p-norm of the finite elements of all tensors together. p as in the check.
double norm_of(const std::vector<TensorCheck>& checks, double p = 2.0);

/// What a list adds up to.
struct Norms {
  double norm = 0.0;               // of all tensors together; inf or NaN where an element is
  std::vector<double> per_tensor;  // where asked, the same of each
  bool finite = true;              // no element is inf or NaN
};
/// sqrt(sum of (x scale)^2), of all and, if asked, of each; nothing is written, so `scale` = 1 /
/// loss scale gives the norm of unscaled gradients. Waits for the host.
Norms multi_tensor_l2norm(const std::vector<TensorView>& x, bool per_tensor = false,
                          double scale = 1.0);

/// out[i] = in[i] * scale, computed in f32 and rounded once; checks `in` (p = 2) in the same pass.
/// The lists are equally long; out[i] has the shape, strides and device of in[i] and any of the
/// dtypes f16, bf16, f32. In place (out[i] is in[i]) is fine; views that overlap otherwise are not.
PendingCheck multi_tensor_scale(const std::vector<TensorView>& in,
                                const std::vector<TensorView>& out, double scale);

enum class CheckedArgument : std::uint8_t { both, x, y };
/// out[i] = a x[i] + b y[i], as multi_tensor_scale; out[i] may be x[i] or y[i]. Checks the
/// arguments named, as if those of an index were one tensor.
PendingCheck multi_tensor_axpby(double a, const std::vector<TensorView>& x, double b,
                                const std::vector<TensorView>& y,
                                const std::vector<TensorView>& out,
                                CheckedArgument checked = CheckedArgument::both);

/// How often reading results of this header or of hash_tensors.h made the host wait for a device,
/// in this process so far (for tests: a training step may do so once).
std::int64_t host_reads();

}  // namespace cairn::kernels
