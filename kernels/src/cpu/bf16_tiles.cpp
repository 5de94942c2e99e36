#include "cpu/bf16_tiles.h"

#include "cpu/dnnl_operation.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cairn::kernels::cpu {

#if defined(__x86_64__)

namespace {

void nothing() {}

#define CAIRN_AMX __attribute__((target("amx-tile,amx-bf16")))

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

CAIRN_AMX void amx_begin() {
  static constexpr TileConfiguration
      kWholeTiles;  // in memory: GCC's intrinsic claims 8 bytes of it
  _tile_loadconfig(&kWholeTiles);
}

CAIRN_AMX void amx_end() {
  _tile_release();
}

/// y [32, 32] in tiles 0..3.
CAIRN_AMX void amx_block(const Bf16Product& p, const core::BFloat16* a, const std::uint32_t* b,
                         float* y) {
  const std::int64_t a_bytes = p.lda * 2, b_bytes = p.ldb * 4, y_bytes = p.ldy * 4;
  if (p.accumulate) {
    _tile_loadd(0, y, y_bytes);
    _tile_loadd(1, y + 16, y_bytes);
    _tile_loadd(2, y + 16 * p.ldy, y_bytes);
    _tile_loadd(3, y + 16 * p.ldy + 16, y_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < p.k; k += 32, a += 32, b += 16 * p.ldb) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(7, b + 16, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * p.lda, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + 16, y_bytes);
  _tile_stored(2, y + 16 * p.ldy, y_bytes);
  _tile_stored(3, y + 16 * p.ldy + 16, y_bytes);
}

CAIRN_AMX void amx_run(const Bf16Product& p) {
  for (std::int64_t i = 0; i < p.m; i += 32) {
    for (std::int64_t j = 0; j < p.n; j += 32) {
      amx_block(p, p.a + i * p.lda, p.b + j, p.y + i * p.ldy + j);
    }
  }
}

#define CAIRN_AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))

/// y [8, 32].
CAIRN_AVX512_BF16 void avx512_block(const Bf16Product& p, const core::BFloat16* a,
                                    const std::uint32_t* b, float* y) {
  constexpr int kRows = 8, kVectors = 2;
  __m512 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = p.accumulate ? _mm512_loadu_ps(y + r * p.ldy + 16 * v) : _mm512_setzero_ps();
    }
  }
  for (std::int64_t k = 0; k < p.k; k += 2, a += 2, b += p.ldb) {
    __m512bh columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 16 * v));
    }
    for (int r = 0; r < kRows; ++r) {
      std::int32_t pair;
      __builtin_memcpy(&pair, a + r * p.lda, sizeof(pair));
      const auto row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = _mm512_dpbf16_ps(sum[r][v], row, columns[v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(y + r * p.ldy + 16 * v, sum[r][v]);
  }
}

CAIRN_AVX512_BF16 void avx512_run(const Bf16Product& p) {
  for (std::int64_t j = 0; j < p.n; j += 32) {
    for (std::int64_t i = 0; i < p.m; i += 8) {
      avx512_block(p, p.a + i * p.lda, p.b + j, p.y + i * p.ldy + j);
    }
  }
}

constexpr Bf16Tiles kAmx{amx_begin, amx_run, amx_end};
constexpr Bf16Tiles kAvx512{nothing, avx512_run, nothing};

}  // namespace

std::vector<const Bf16Tiles*> all_bf16_tiles() {
  std::vector<const Bf16Tiles*> all;
  // oneDNN has asked the system for the tile registers where it says that they are there.
  if (onednn::has_isa(dnnl::cpu_isa::avx512_core_amx)) all.push_back(&kAmx);
  if (onednn::has_isa(dnnl::cpu_isa::avx512_core_bf16)) all.push_back(&kAvx512);
  return all;
}

const Bf16Tiles* bf16_tiles() {
  if (onednn::has_isa(dnnl::cpu_isa::avx512_core_amx)) return &kAmx;
  // Zen 4 and 5 multiply bf16 at twice the rate of f32, Intel's at half of it.
  static const bool amd = __builtin_cpu_is("amd") != 0;
  return amd && onednn::has_isa(dnnl::cpu_isa::avx512_core_bf16) ? &kAvx512 : nullptr;
}

#else

std::vector<const Bf16Tiles*> all_bf16_tiles() {
  return {};
}

const Bf16Tiles* bf16_tiles() {
  return nullptr;
}

#endif

}  // namespace cairn::kernels::cpu
