// Results so large that the CPU writes them past its caches.
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/loss.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

TEST(PastTheCaches, CopiesBytesFromAnywhereToAnywhere) {
  std::mt19937 random(8);
  std::vector<unsigned char> from(4096), to(4096);
  for (unsigned char& byte : from) byte = static_cast<unsigned char>(random());
  for (int round = 0; round < 3000; ++round) {
    const std::size_t bytes = random() % (round % 2 == 0 ? 200 : 3900);
    const std::size_t first = random() % 190, second = random() % 190;
    std::vector<unsigned char> expected = to;
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(first), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(second));
    copy_past_caches(from.data() + first, to.data() + second, bytes);
    ASSERT_EQ(to, expected) << bytes << " from " << first << " to " << second;
    std::shuffle(from.begin(), from.end(), random);
  }
}

// 69 MB of gradients go past the caches; each row alone does not.
TEST(PastTheCaches, LargeGradientsHaveTheBitsOfSmallOnes) {
  const std::int64_t rows = 173, classes = 100003;  // odd: rows start at every alignment
  const Tensor x = Tensor::empty({rows, classes}, DType::f32), dx = Tensor::empty_like(x);
  const Tensor pattern =
      Tensor::from(test::random_values(classes, 4, -4, 4), {classes}, DType::f32);
  copy(pattern, x);
  const Tensor target = Tensor::full({rows}, 7, DType::i64);
  const Tensor loss = Tensor::full({rows}, 1.0, DType::f32), lse = Tensor::empty_like(loss);
  cross_entropy(x, target, loss, lse, {});
  const Tensor dloss = Tensor::full({rows}, 1.0, DType::f32);
  cross_entropy_backward(x, target, lse, dloss, dx, {});
  const Tensor row = Tensor::empty({1, classes}, DType::f32);
  for (std::int64_t i : {0, 1, 2, 3, 87, 172}) {
    const auto part = [&](const Tensor& t) { return t.view().slice(0, i, i + 1); };
    cross_entropy_backward(part(x), part(target), part(lse), part(dloss), row, {});
    EXPECT_EQ(dx.alias(part(dx)).to_vector<float>(), row.to_vector<float>()) << i;
  }
}

// 64 MiB of half weights go past the caches.
TEST(PastTheCaches, LargeHalfWeightsAreTheirMastersRounded) {
  const std::int64_t n = (std::int64_t{32} << 20) + 5;
  const Tensor all = Tensor::full({n + 1}, 0.5, DType::bf16);
  const TensorView weight = all.view().slice(0, 1, n + 1);  // aligned to its element only
  const Tensor gradient = Tensor::full({n}, 1.0, DType::bf16);
  const Tensor master = Tensor::empty({n}, DType::f32);
  const Tensor pattern = test::random_tensor({64 * 1024 + 1}, DType::f32, {}, 1);
  for (std::int64_t at = 0; at < n; at += pattern.numel()) {
    const std::int64_t count = std::min(pattern.numel(), n - at);
    copy(pattern.view().slice(0, 0, count), master.view().slice(0, at, at + count));
  }
  update({{gradient, weight, master, {}, {}}}, SgdOptions{.lr = 0.25});
  const Tensor expected = Tensor::empty({n}, DType::bf16);
  copy(master, expected);
  const Tensor difference = Tensor::empty({n}, DType::boolean);
  binary(BinaryOp::ne, all.alias(weight), expected, difference);
  const Tensor count = Tensor::empty({1}, DType::i64);
  reduce(ReductionKind::sum, difference, count);
  EXPECT_EQ(count.item(), 0.0);
  EXPECT_EQ(all.to_vector<float>()[0], 0.5f);
}

// Apex's size for 64-bit indices, 4.7 GB of halves: pages that are only read are never allocated.
TEST(PastTheCaches, ChecksAndHashesMoreThanTwoToTheThirtyFirstElements) {
  constexpr std::int64_t kCount = 2'359'332'864;
  void* const memory = mmap(nullptr, 2 * kCount, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << "no address space for 4.7 GB";
  madvise(memory, 2 * kCount, MADV_NOHUGEPAGE);
  const TensorView x(memory, {kCount}, DType::bf16);
  const auto set = [&](std::int64_t at, float value) {
    x.as<core::BFloat16>()[at] = core::BFloat16(value);
  };
  const std::uint64_t zeros = hash_tensors({x})[0];
  set(5, 3.0f);
  set(kCount - 1, 4.0f);
  EXPECT_EQ(multi_tensor_l2norm({x}).norm, 5.0);
  EXPECT_NE(hash_tensors({x})[0], zeros);
  set(kCount - 3, std::numeric_limits<float>::infinity());
  const TensorCheck check = check_tensors({x}).read()[0];
  EXPECT_EQ(check.nonfinite, 1);
  EXPECT_EQ(check.nan, 0);
  EXPECT_EQ(check.power_sum, 25.0);
  munmap(memory, 2 * kCount);
}

}  // namespace
}  // namespace cairn::kernels
