#include "safetensors_format.h"

#include <xxhash.h>

#include <array>
#include <utility>

namespace cairn::checkpointing {

namespace {
constexpr std::array<std::pair<DType, const char*>, 9> kNames = {{{DType::f16, "F16"},
                                                                  {DType::bf16, "BF16"},
                                                                  {DType::f32, "F32"},
                                                                  {DType::f64, "F64"},
                                                                  {DType::i16, "I16"},
                                                                  {DType::i32, "I32"},
                                                                  {DType::i64, "I64"},
                                                                  {DType::u8, "U8"},
                                                                  {DType::boolean, "BOOL"}}};
}  // namespace

const char* safetensors_name(DType dtype) {
  for (const auto& [ours, text] : kNames) {
    if (ours == dtype) return text;
  }
  return "?";
}

bool parse_safetensors_dtype(const std::string& text, DType& dtype) {
  for (const auto& [ours, name] : kNames) {
    if (name != text) continue;
    dtype = ours;
    return true;
  }
  return false;
}

std::uint64_t checksum(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}

}  // namespace cairn::checkpointing
