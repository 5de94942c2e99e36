// Which lists a capture takes: a graph holds the addresses of their pointer tables.
#include "simt/kernels/emulated_queue.h"

#include <gtest/gtest.h>

#include "cairn/core/error.h"
#include "cairn/kernels/optimizer_update.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

/// A list of one parameter, and a step of Adam over it that reads the device.
struct Training {
  Tensor gradient = test::random_tensor({100}, DType::bf16, {}, 1), weight = filled(1.0),
         moment1 = filled(0.0), moment2 = filled(0.0);
  Tensor lr = Tensor::full({1}, 0.1, DType::f64), step = Tensor::zeros({1}, DType::i32);

  static Tensor filled(double value) { return Tensor::full({100}, value); }
  void run() const {
    update({{gradient, weight, {}, moment1, moment2}}, AdamOptions{}, {.lr = lr, .step = step});
  }
  bool can_be_captured() const {
    cuda::emulated_capture() = true;
    bool taken = true;
    try {
      run();
    } catch (const core::InvalidArgument&) {
      taken = false;
    }
    cuda::emulated_capture() = false;
    return taken;
  }
};

TEST(Capture, TakesListsThatRanBeforeAndKeepsTheirTablesForGood) {
  const Training captured, forgotten;
  EXPECT_FALSE(captured.can_be_captured());
  captured.run();
  forgotten.run();
  EXPECT_TRUE(captured.can_be_captured());
  const std::vector<Training> others(1100);  // more than are kept
  for (const Training& other : others) other.run();
  EXPECT_TRUE(captured.can_be_captured());
  EXPECT_FALSE(forgotten.can_be_captured());
}

}  // namespace
}  // namespace cairn::kernels
