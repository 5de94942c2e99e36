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

/// Appends as much as there is room for.
struct FixedText {
  std::span<char> out;
  std::size_t size = 0;

  void operator+=(char letter) {
    if (size < out.size()) out[size++] = letter;
  }
  void operator+=(std::string_view piece) {
    size += piece.copy(out.data() + size, out.size() - size);
  }
};

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
      on_gpu_(x.device.is_cuda()),
      shape_(x.shape),
      name_(name),
      bytes_(static_cast<std::int64_t>(x.nbytes())),
      hash_(mixed(mixed(mixed(2, operation), detail), name_)) {
  hash_ = mixed(hash_, static_cast<std::uint64_t>(root));
  hash_ = mixed(hash_, static_cast<std::uint64_t>(x.dtype));
  for (const std::int64_t size : x.shape) hash_ = mixed(hash_, static_cast<std::uint64_t>(size));
}

MovedSizes Description::moved() const {
  return moved_.value_or(MovedSizes{dtype_, on_gpu_, false, shape_, shape_});
}

/// The text, piece by piece.
template <class Text>
void Description::spell(Text& text) const {
  const auto add_number = [&](std::int64_t number) {
    std::array<char, 24> digits;
    text += std::string_view(
        digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr);
  };
  if (operation_ == nullptr) {
    text += name_;
    return;
  }
  text += std::string_view(operation_);
  if (!detail_.empty()) text += ' ', text += detail_;
  if (root_ >= 0) text += ' ', add_number(root_);
  text += ' ', text += std::string_view(core::name(dtype_)), text += '[';
  for (int i = 0; i < shape_.dims(); ++i) {
    if (i > 0) text += ',', text += ' ';
    add_number(shape_[i]);
  }
  text += ']';
  if (!name_.empty()) text += ' ', text += '\'', text += name_, text += '\'';
}

std::string Description::text() const {
  std::string text;
  spell(text);
  return text;
}

std::size_t Description::write(std::span<char> out) const {
  FixedText text{out};
  spell(text);
  return text.size;
}

std::uint64_t fingerprint(const Description& description, std::uint64_t sequence) {
  return mixed(description.hash(), sequence);
}

}  // namespace cairn::parallel
