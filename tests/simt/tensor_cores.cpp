// What a warp does with its tensor cores, in plain C++: registers hold what PTX ISA 8 says they
// hold ("Matrix Fragments for mma.m16n8k16", "ldmatrix").
#include "simt/emulator.h"

namespace cairn::simt {
namespace {

using Lanes = std::array<std::uint64_t, kWarpSize>;

template <class Part>
Part& part_of(const Lanes& lanes, unsigned lane) {
  return *reinterpret_cast<Part*>(lanes[lane]);
}

template <class Part>
void together(Part& part, Machine::Together* work, const Site& site) {
  Machine::current().warp_exchange(kFullMask, reinterpret_cast<std::uint64_t>(&part), -1, site,
                                   work);
}

/// Half `i` (0 or 1) of a register.
std::uint16_t half(std::uint32_t word, unsigned i) {
  return static_cast<std::uint16_t>(word >> 16 * i);
}

struct Load {
  const void* row;
  bool transposed;
  std::uint32_t* words;
};

std::uint16_t element(const Lanes& lanes, unsigned matrix, unsigned row, unsigned column) {
  std::uint16_t value;
  const auto* const from =
      static_cast<const std::byte*>(part_of<Load>(lanes, 8 * matrix + row).row);
  std::memcpy(&value, from + 2 * column, 2);
  return value;
}

void load_all(const Lanes& lanes) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const Load& load = part_of<Load>(lanes, lane);
    const unsigned row = lane / 4, column = lane % 4 * 2;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      std::uint32_t word = 0;
      for (unsigned i = 0; i < 2; ++i) {
        const std::uint32_t value = load.transposed ? element(lanes, matrix, column + i, row)
                                                    : element(lanes, matrix, row, column + i);
        word |= value << 16 * i;
      }
      load.words[matrix] = word;
    }
  }
}

struct Product {
  float* sums;
  const std::uint32_t *a, *b;
  float (*widen)(std::uint16_t);
};

void multiply_all(const Lanes& lanes) {
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const Product& part = part_of<Product>(lanes, lane);
    const unsigned group = lane / 4, pair = lane % 4 * 2;
    for (unsigned i = 0; i < 8; ++i) {
      a[group + i / 2 % 2 * 8][pair + i % 2 + i / 4 * 8] = part.widen(half(part.a[i / 2], i % 2));
    }
    for (unsigned i = 0; i < 4; ++i) {
      b[pair + i % 2 + i / 2 * 8][group] = part.widen(half(part.b[i / 2], i % 2));
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float& sum = part_of<Product>(lanes, lane).sums[i];
      for (unsigned k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
    }
  }
}

}  // namespace

void load_matrices(const void* row, bool transposed, std::uint32_t (&words)[4], const Site& site) {
  require_aligned(row, 16);
  if (!Machine::current().is_shared(row, 16)) {
    throw Error("a matrix is loaded from memory that is not the block's shared memory");
  }
  Load load{row, transposed, words};
  together(load, load_all, site);
}

void multiply_matrices(float (&sums)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                       float (*widen)(std::uint16_t), const Site& site) {
  Product product{sums, a, b, widen};
  together(product, multiply_all, site);
}

void copy_async(void* to, const void* from, const Site& site) {
  require_aligned(to, 16);
  Machine::current().copy_async(to, from, site);
}
void wait_for_copies() {
  Machine::current().wait_for_copies();
}

}  // namespace cairn::simt
