#include "control/description.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <utility>

namespace cairn::parallel {
namespace {

/// Every bit of the word reaches all of the hash.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// Eight bytes at a time, and the length.
std::uint64_t mixed(std::uint64_t hash, std::string_view text) {
  for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    hash = mixed(hash, word);
  }
  return mixed(hash, text.size());
}

}  // namespace

MovedSizes moved_sizes(const TensorView& own, const TensorView& in, const TensorView& out) {
  return {own.dtype, own.device.is_cuda(), false, in.shape, out.shape};
}

Description::Description(std::string text, std::int64_t bytes)
    : name_(std::move(text)), bytes_(bytes), hash_(mixed(1, name_)) {}

Description::Description(const char* operation, std::string_view detail, int root,
                         const TensorView& x, std::string_view name)
    : operation_(operation),
      detail_(detail),
      root_(root),
      dtype_(x.dtype),
      shape_(x.shape),
      name_(name),
      bytes_(static_cast<std::int64_t>(x.nbytes())),
      hash_(mixed(mixed(mixed(2, operation), detail), name_)) {
  moved_ = moved_sizes(x, x, x);
  hash_ = mixed(hash_, static_cast<std::uint64_t>(root));
  hash_ = mixed(hash_, static_cast<std::uint64_t>(x.dtype));
  for (const std::int64_t size : x.shape) hash_ = mixed(hash_, static_cast<std::uint64_t>(size));
}

/// The text, piece by piece.
template <class Add>
void Description::spell(const Add& add) const {
  const auto add_number = [&](std::int64_t number) {
    std::array<char, 24> digits;
    add({digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr});
  };
  if (operation_ == nullptr) return add(name_);
  add(operation_);
  if (!detail_.empty()) add(" "), add(detail_);
  if (root_ >= 0) add(" "), add_number(root_);
  add(" "), add(core::name(dtype_)), add("[");
  for (int i = 0; i < shape_.dims(); ++i) add(i > 0 ? ", " : ""), add_number(shape_[i]);
  add("]");
  if (!name_.empty()) add(" '"), add(name_), add("'");
}

std::string Description::text() const {
  std::string text;
  spell([&](std::string_view piece) { text += piece; });
  return text;
}

std::size_t Description::write(std::span<char> out) const {
  std::size_t size = 0;
  spell([&](std::string_view piece) { size += piece.copy(out.data() + size, out.size() - size); });
  return size;
}

std::uint64_t fingerprint(const Description& description, std::uint64_t sequence) {
  return mixed(description.hash(), sequence);
}

}  // namespace cairn::parallel
