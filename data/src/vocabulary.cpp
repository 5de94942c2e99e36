#include <algorithm>
#include <set>

#include "byte_pairs.h"
#include "cairn/data/text.h"

namespace cairn::data {

namespace {

using core::DataError;
using core::fail;

constexpr int kBytes = 256;

struct Character {
  std::uint32_t point = 0;
  std::size_t length = 0;  // bytes
};

// Length and leading bits of a UTF-8 sequence by its first byte; length 0: none starts so.
Character lead_of(unsigned char byte) {
  if (byte < 0x80) return {byte, 1};
  if (byte >= 0xC2 && byte < 0xE0) return {byte & 0x1Fu, 2};
  if (byte >= 0xE0 && byte < 0xF0) return {byte & 0x0Fu, 3};
  if (byte >= 0xF0 && byte < 0xF5) return {byte & 0x07u, 4};
  return {};
}

bool is_proper(std::uint32_t point, std::size_t length) {
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  return point >= kSmallest[length] && point <= 0x10FFFF && (point < 0xD800 || point > 0xDFFF);
}

// The character at byte `at`. Throws DataError where there is none.
Character decode_at(std::string_view text, std::size_t at) {
  Character c = lead_of(static_cast<unsigned char>(text[at]));
  bool valid = c.length > 0 && at + c.length <= text.size();
  for (std::size_t i = 1; valid && i < c.length; ++i) {
    const auto byte = static_cast<unsigned char>(text[at + i]);
    valid = (byte & 0xC0) == 0x80;
    c.point = c.point << 6 | (byte & 0x3Fu);
  }
  if (!valid || !is_proper(c.point, c.length)) {
    fail<DataError>("vocabulary", "expected UTF-8 text, got byte ",
                    static_cast<int>(static_cast<unsigned char>(text[at])), " at offset ", at,
                    " (use TextUnit::bytes for other text)");
  }
  return c;
}

}  // namespace

Vocabulary Vocabulary::of_bytes() {
  Vocabulary vocabulary;
  for (int byte = 0; byte < kBytes; ++byte)
    vocabulary.symbols_.emplace_back(1, static_cast<char>(byte));
  return vocabulary;
}

Vocabulary Vocabulary::of_characters(std::string_view text) {
  std::set<std::pair<std::uint32_t, std::string_view>> found;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = decode_at(text, at);
    found.emplace(c.point, text.substr(at, c.length));
    at += c.length;
  }
  Vocabulary vocabulary;
  vocabulary.unit_ = TextUnit::characters;
  for (const auto& [point, symbol] : found) {
    vocabulary.points_.push_back(point);
    vocabulary.symbols_.emplace_back(symbol);
  }
  return vocabulary;
}

Vocabulary Vocabulary::of_tokenizer(const std::string& path) {
  Vocabulary vocabulary;
  vocabulary.unit_ = TextUnit::byte_pairs;
  vocabulary.pairs_ = std::make_shared<const detail::BytePairs>(detail::BytePairs::from_file(path));
  vocabulary.symbols_ = vocabulary.pairs_->symbols();
  return vocabulary;
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text) const {
  if (unit_ == TextUnit::byte_pairs) return pairs_->encode(text);
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  if (unit_ == TextUnit::bytes) {
    for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  for (std::size_t at = 0; at < text.size();) {
    const Character c = decode_at(text, at);
    const auto found = std::lower_bound(points_.begin(), points_.end(), c.point);
    if (found == points_.end() || *found != c.point) {
      fail<DataError>("vocabulary", "expected one of its ", size(), " characters, got '",
                      text.substr(at, c.length), "' at byte ", at);
    }
    tokens.push_back(static_cast<std::int32_t>(found - points_.begin()));
    at += c.length;
  }
  return tokens;
}

std::string Vocabulary::decode(const std::vector<std::int64_t>& tokens) const {
  std::string text;
  for (std::int64_t token : tokens) text += symbol(token);
  return text;
}

const std::string& Vocabulary::symbol(std::int64_t token) const {
  CAIRN_CHECK(token >= 0 && token < size(), "vocabulary", "expected a token below ", size(),
              ", got ", token);
  return symbols_[static_cast<std::size_t>(token)];
}

}  // namespace cairn::data
