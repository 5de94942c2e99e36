// Tensors of more than 2^31 elements in the passes over lists, without allocating them: how they
// are cut, and the CUDA kernels on the last elements of one.
#include <gtest/gtest.h>

#include <numeric>

#include "cpu/chunks.h"
#include "cuda/launch.cuh"
#include "cuda/optimizer_update.cuh"
#include "cuda/table.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

const std::vector<std::int64_t> kCounts = {5, (std::int64_t{1} << 31) + 7, 0, 5'000'000'019, 1};

TEST(LargeLists, TheCpuCutsThemWithoutGapsOrOverlaps) {
  const auto chunks = cpu::cut(kCounts.size(), [](std::size_t i) { return kCounts[i]; });
  std::vector<std::int64_t> next(kCounts.size(), 0);
  for (const cpu::Chunk& chunk : chunks) {
    ASSERT_EQ(chunk.begin, next[chunk.tensor]);
    ASSERT_GT(chunk.count, 0);
    ASSERT_LE(chunk.count, cpu::kChunk);
    next[chunk.tensor] += chunk.count;
  }
  EXPECT_EQ(next, kCounts);

  char base;
  const TensorView view(&base, {kCounts[3]}, DType::f32);
  const auto address = reinterpret_cast<std::uintptr_t>(cpu::bytes_at(view, kCounts[3] - 1));
  EXPECT_EQ(address - reinterpret_cast<std::uintptr_t>(&base), 20'000'000'072u);
}

TEST(LargeLists, TheDeviceTableCutsThemWithoutGapsOrOverlaps) {
  const cuda::Chunks chunks = cuda::cut(kCounts);
  ASSERT_EQ(chunks.first.size(), kCounts.size() + 1);
  std::vector<std::int64_t> next(kCounts.size(), 0);
  for (std::size_t block = 0; block < chunks.slot.size(); ++block) {
    const auto slot = static_cast<std::size_t>(chunks.slot[block]);
    const cuda::Span span =
        cuda::span_of(static_cast<std::int64_t>(block), chunks.first[slot], kCounts[slot]);
    ASSERT_EQ(span.begin, next[slot]);
    ASSERT_GT(span.end, span.begin);
    next[slot] = span.end;
  }
  EXPECT_EQ(next, kCounts);
}

// The table says that the launch's one block is the last chunk of a tensor of 5 billion elements,
// of which only that chunk has memory.
TEST(LargeLists, AnUpdateReachesTheLastElements) {
  const std::int64_t count = kCounts[3], chunk = count / cuda::kChunk;
  const std::int64_t begin = chunk * cuda::kChunk, left = count - begin;
  const Tensor gradient = test::random_tensor({left}, DType::bf16, {}, 1);
  const Tensor weight = test::random_tensor({left}, DType::bf16, {}, 2);
  const Tensor master = test::random_tensor({left}, DType::f32, {}, 3);
  std::vector<double> expected = master.to_vector<double>();
  const std::vector<double> g = gradient.to_vector<double>();
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] -= 0.5 * g[i];

  const auto first_element = [&](const TensorView& last) {
    const auto bytes = static_cast<std::uintptr_t>(begin) * core::size_of(last.dtype);
    return TensorView(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(last.data) - bytes),
                      {count}, last.dtype);
  };
  const cuda::Slot slot =
      cuda::slot_of({first_element(gradient), first_element(weight), first_element(master)});
  const std::int32_t chunk_slot[] = {0};
  const std::int32_t first_chunk[] = {-static_cast<std::int32_t>(chunk), 1};
  const cuda::Table table{&slot, chunk_slot, first_chunk, 1, 1};
  const cuda::Queue queue("update", {});
  const SgdOptions options{.lr = 0.5};
  cuda::launch(queue, {1, cuda::kThreads}, cuda::update_kernel<math::Sgd<float>>, table,
               cuda::ListScalars{{1.0f, 0.0f, 1.0f}, nullptr}, math::Sgd<float>(options));
  test::expect_close(master, expected, 1e-6, 1e-7);
  const Tensor rounded = Tensor::from(master.to_vector<double>(), {left}, DType::bf16);
  EXPECT_EQ(weight.to_vector<double>(), rounded.to_vector<double>());
}

}  // namespace
}  // namespace cairn::kernels
