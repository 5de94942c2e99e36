// What the system says of the process's memory, and what allocators give back to it.
#include "cairn/core/process_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/tensor.h"

namespace cairn::core {
namespace {

constexpr std::size_t kBlock = (std::size_t{1} << 20) - 4096;  // too small for huge pages

std::vector<Tensor> touched_blocks(int count) {
  std::vector<Tensor> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.push_back(Tensor::empty({static_cast<std::int64_t>(kBlock)}, DType::u8, Device{}));
    std::memset(blocks.back().storage()->data(), 1, kBlock);
  }
  return blocks;
}

TEST(ProcessMemory, IsWhatTheSystemSays) {
  reset_most_process_memory();
  const std::size_t before = process_memory("VmRSS");
  { const std::vector<char> data(std::size_t{32} << 20, 'x'); }
  EXPECT_GE(process_memory("VmHWM"), before + (std::size_t{31} << 20));
  EXPECT_EQ(process_memory("VmNothing"), 0u);
  EXPECT_GT(memory_left(), 0u);
  EXPECT_LT(memory_left(), std::size_t{1} << 50);
}

TEST(ProcessMemory, IsKnownByItsParts) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has a malloc of its own";
#endif
  constexpr std::size_t kBytes = std::size_t{32} << 20, kStack = std::size_t{2} << 20;
  const ProcessParts before = process_parts();
  EXPECT_GT(before.code, 0u);
  std::vector<char> data(kBytes, 'x');
  const Tensor x = Tensor::zeros({static_cast<std::int64_t>(2 * kBytes)}, DType::u8, Device{});
  ProcessParts parts;
  std::thread([&] {
    volatile char deep[kStack];
    for (std::size_t i = 0; i < kStack; i += 1024) deep[i] = 1;
    parts = process_parts();
    EXPECT_EQ(deep[0], 1);
  }).join();
  const auto grown = [](std::size_t now, std::size_t then) {
    return static_cast<double>(now) - static_cast<double>(then);
  };
  EXPECT_NEAR(grown(parts.tensors, before.tensors), 2.0 * kBytes, 0.1 * kBytes);
  EXPECT_NEAR(grown(parts.heap, before.heap), 1.0 * kBytes, 0.1 * kBytes);
  EXPECT_GE(parts.stacks, kStack);
  // What malloc keeps of freed memory may be the system's again, or not yet.
  const std::size_t used = parts.code + parts.tensors + parts.heap + parts.stacks + parts.other;
  const std::size_t has = process_memory("VmRSS"), tolerance = kBytes / 5;
  EXPECT_LE(used, has + tolerance);
  EXPECT_GE(used + parts.heap_free + tolerance, has);
}

TEST(CacheBound, HoldsForLiveAndCachedBlocks) {
  const Device device{};
  release_cached_memory(device);
  const std::size_t live = memory_stats(device).reserved, bound = live + 8 * kBlock;
  set_cache_bound(device, bound);
  for (int i = 1; i <= 6; ++i) {  // sizes that do not serve each other
    const auto elements = static_cast<std::int64_t>(kBlock) * (8 - i) / 8;
    const Tensor x = Tensor::empty({elements}, DType::u8, device),
                 y = Tensor::empty({4 * elements}, DType::u8, device);
    EXPECT_LE(memory_stats(device).reserved, bound) << i;
  }
  const std::size_t cached = memory_stats(device).reserved;
  EXPECT_GT(cached, live);
  set_cache_bound(device, live);  // at once
  EXPECT_EQ(memory_stats(device).reserved, live);
  {
    const std::vector<Tensor> more = touched_blocks(4);  // live ones may pass it
    EXPECT_GE(memory_stats(device).reserved, live + 4 * kBlock);
  }
  set_cache_bound(device, SIZE_MAX);
}

// Blocks of less than a huge page, among others that stay.
TEST(CacheBound, WhatGoesBackIsTheSystemsAtOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps what is freed";
#endif
  const Device device{};
  release_cached_memory(device);
  const std::size_t live = memory_stats(device).reserved;
  std::vector<Tensor> blocks = touched_blocks(64);
  for (int i = 0; i < 64; i += 2) blocks[static_cast<std::size_t>(i)] = Tensor();
  const std::size_t before = process_memory("VmRSS");
  set_cache_bound(device, live + 32 * kBlock);
  EXPECT_LE(process_memory("VmRSS"), before - 28 * kBlock);
  set_cache_bound(device, SIZE_MAX);
}

}  // namespace
}  // namespace cairn::core
