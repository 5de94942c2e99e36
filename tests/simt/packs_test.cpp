// 16-byte accesses: what they move, and that the emulator sees one that is not aligned.
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "cuda/device/packed.cuh"

namespace cairn::kernels::cuda {
namespace {

alignas(16) std::array<float, 16> memory;

TEST(Packs, MoveWhatLiesThere) {
  std::iota(memory.begin(), memory.end(), 1.0f);
  const auto pack = load_pack<8>(memory.data());
  store_pack<8>(memory.data() + 8, pack);
  for (std::size_t k = 0; k < 8; ++k) EXPECT_EQ(memory[8 + k], static_cast<float>(k + 1));
}

TEST(Packs, AtOtherAddressesAreErrors) {
  EXPECT_THROW(load_pack<4>(memory.data() + 1), simt::Error);
  EXPECT_THROW(store_pack<4>(memory.data() + 2, Packed<float, 4>{}), simt::Error);
}

TEST(Packs, StartWhereAllOperandsAllow) {
  const float* const x = memory.data();
  const float* const absent = nullptr;
  EXPECT_EQ(common_head(10, x, x + 4), 0);
  EXPECT_EQ(common_head(10, x + 1, x + 5), 3);
  EXPECT_EQ(common_head(2, x + 1, x + 5), 2);
  EXPECT_EQ(common_head(10, x + 1, x + 2), 10);
  EXPECT_EQ(common_head(10, x + 1, absent), 3);
}

}  // namespace
}  // namespace cairn::kernels::cuda
