#include "formats/safetensors/format.h"

#include <xxhash.h>

#include <array>
#include <new>
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

namespace {
XXH3_state_t* xxh3(void* state) {
  return static_cast<XXH3_state_t*>(state);
}
}  // namespace

RunningChecksum::RunningChecksum() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(xxh3(state_));
}

RunningChecksum::~RunningChecksum() {
  XXH3_freeState(xxh3(state_));
}

void RunningChecksum::add(const void* data, std::size_t bytes) {
  XXH3_64bits_update(xxh3(state_), data, bytes);
}

std::uint64_t RunningChecksum::value() const {
  return XXH3_64bits_digest(xxh3(state_));
}

}  // namespace cairn::checkpointing
