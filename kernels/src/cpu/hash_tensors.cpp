#include <bit>
#include <cstring>

#include "cairn/core/parallel_for.h"
#include "cpu/chunks.h"
#include "cpu/cpu_backend.h"
#include "word_hash.h"

namespace cairn::kernels {

namespace {

std::uint64_t hash_of(const unsigned char* bytes, const cpu::Chunk& chunk) {
  static_assert(std::endian::native == std::endian::little && cpu::kChunk % 8 == 0);
  std::uint64_t sum = 0;
  std::int64_t at = chunk.begin, place = chunk.begin / 8;
  const std::int64_t end = chunk.begin + chunk.count;
  for (; at + 8 <= end; at += 8, ++place) {
    std::uint64_t word;
    std::memcpy(&word, bytes + at, sizeof(word));
    sum += WordHash::of(word, place);
  }
  if (at < end) sum += WordHash::of(WordHash::load(bytes + at, end - at), place);
  return sum;
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
