// hash_tensors. Compiled for every instruction set: GCC makes vectors of the loop where there is a
// 64-bit multiplication (AVX-512), seven times as fast.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/hash_tensors.cpp"
#include "cpu/targets.h"
// ---
#include <bit>
#include <cstring>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/cpu_backend.h"
#include "hwy/highway.h"
#include "math/word_hash.h"

HWY_BEFORE_NAMESPACE();
namespace cairn::kernels {
namespace HWY_NAMESPACE {

/// The sum over n whole words, of which the first has this place.
std::uint64_t HashWords(const unsigned char* bytes, std::int64_t n, std::int64_t place) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + 8 * i, sizeof(word));
    sum += WordHash::of(word, place + i);
  }
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace cairn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cairn::kernels {

HWY_EXPORT(HashWords);

namespace {

std::uint64_t hash_of(const unsigned char* bytes, const cpu::Chunk& chunk) {
  static_assert(std::endian::native == std::endian::little && cpu::kChunk % 8 == 0);
  const std::int64_t place = chunk.begin / 8, words = chunk.count / 8, rest = chunk.count % 8;
  const unsigned char* from = bytes + chunk.begin;
  const std::uint64_t sum = HWY_DYNAMIC_DISPATCH(HashWords)(from, words, place);
  if (rest == 0) return sum;
  return sum + WordHash::of(WordHash::load(from + 8 * words, rest), place + words);
}

}  // namespace

void CpuBackend::hash_tensors(const std::vector<TensorView>& tensors, std::uint64_t* hashes) const {
  const auto bytes = [&](std::size_t i) { return static_cast<std::int64_t>(tensors[i].nbytes()); };
  const std::vector<cpu::Chunk> chunks = cpu::cut(tensors.size(), bytes);
  std::vector<std::uint64_t> parts(chunks.size()), sums(tensors.size());
  core::parallel_for(
      static_cast<std::int64_t>(chunks.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
          parts[k] = hash_of(tensors[chunks[k].tensor].as<unsigned char>(), chunks[k]);
        }
      });
  for (std::size_t k = 0; k < chunks.size(); ++k) sums[chunks[k].tensor] += parts[k];
  for (std::size_t i = 0; i < tensors.size(); ++i) hashes[i] = WordHash::finish(sums[i], bytes(i));
}

}  // namespace cairn::kernels
#endif
