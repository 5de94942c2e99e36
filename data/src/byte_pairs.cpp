#include "byte_pairs.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <queue>
#include <tuple>

#include "cairn/core/error.h"
#include "file_bytes.h"

namespace cairn::data::detail {

namespace {

using core::DataError;
using core::fail;
using nlohmann::json;

constexpr const char* kTokenizer = "tokenizer";

template <class... Text>
[[noreturn]] void refuse(const std::string& path, const Text&... text) {
  fail<DataError>(kTokenizer, "expected ", text..., " in ", path);
}

/// GPT-2's way to cut words, with Unicode's White_Space: PCRE's \s lacks a character of it.
std::string words() {
  const std::string space =
      "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
      "\\x{205f}\\x{3000}";
  return core::str("'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^", space, "\\p{L}\\p{N}]+|[",
                   space, "]+(?![^", space, "])|[", space, "]+");
}

struct FreePattern {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

const pcre2_code* words_pattern() {
  static const std::unique_ptr<pcre2_code, FreePattern> pattern = [] {
    int error = 0;
    PCRE2_SIZE at = 0;
    const std::string text = words();
    auto* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                     PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
    CAIRN_CHECK(code != nullptr, kTokenizer, "expected PCRE2 with Unicode, got error ", error,
                " at ", at);
    return std::unique_ptr<pcre2_code, FreePattern>(code);
  }();
  return pattern.get();
}

/// Printable stand-ins of the 256 bytes, as code points: those that print stand for themselves.
std::array<std::uint32_t, 256> letters_of_bytes() {
  std::array<std::uint32_t, 256> letters{};
  std::uint32_t next = 256;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool prints = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    letters[byte] = prints ? byte : next++;
  }
  return letters;
}

/// The bytes that a token's letters stand for. All letters are of one or two bytes in UTF-8.
std::string bytes_of(std::string_view token, const std::string& path) {
  static const auto kBytes = [] {
    std::unordered_map<std::uint32_t, char> bytes;
    const auto letters = letters_of_bytes();
    for (std::size_t byte = 0; byte < 256; ++byte) bytes[letters[byte]] = static_cast<char>(byte);
    return bytes;
  }();
  std::string bytes;
  for (std::size_t at = 0; at < token.size(); ++at) {
    auto point = static_cast<std::uint32_t>(static_cast<unsigned char>(token[at]));
    if (point >= 0xc0 && at + 1 < token.size())
      point = (point & 0x1fU) << 6 | (static_cast<unsigned char>(token[++at]) & 0x3fU);
    const auto found = kBytes.find(point);
    if (found == kBytes.end()) refuse(path, "tokens of byte-level letters, got '", token, "'");
    bytes += found->second;
  }
  return bytes;
}

bool is_set(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && !found->is_null() && *found != false && *found != "";
}

std::int64_t token_of(const json& number, const std::string& path) {
  if (!number.is_number_integer()) refuse(path, "whole numbers as tokens, got ", number.dump());
  return number;
}

/// ["a", "b"], or "a b" of older files.
std::pair<std::string, std::string> halves_of(const json& merge) {
  if (merge.is_array()) return {merge.at(0), merge.at(1)};
  const std::string both = merge;
  const std::size_t space = both.find(' ');
  return {both.substr(0, space), space == std::string::npos ? "" : both.substr(space + 1)};
}

/// Of ways to cut text into words there is GPT-2's alone.
bool adds_space(const json& file, const std::string& path) {
  const json& cut = file.value("pre_tokenizer", json());
  const bool is_known = cut.is_object() && cut.value("type", "") == "ByteLevel" &&
                        cut.value("use_regex", true) && !is_set(file, "normalizer");
  if (!is_known)
    refuse(path, "a pre_tokenizer ByteLevel with use_regex and no normalizer (GPT-2's), got ",
           cut.dump(), " and ", file.value("normalizer", json()).dump());
  return cut.value("add_prefix_space", false);
}

}  // namespace

BytePairs BytePairs::from_file(const std::string& path) {
  BytePairs pairs;
  try {
    pairs.read_vocabulary(read_maybe_gzip(path, kTokenizer), path);
  } catch (const json::exception& error) {
    fail<DataError>(kTokenizer, "expected a tokenizer.json, got ", error.what(), " in ", path);
  }
  return pairs;
}

void BytePairs::read_vocabulary(const std::string& text, const std::string& path) {
  const json file = json::parse(text);
  const json& model = file.at("model");
  if (model.value("type", "BPE") != "BPE")
    refuse(path, "a model of type BPE, got ", model.at("type").dump());
  for (const char* other : {"dropout", "unk_token", "continuing_subword_prefix",
                            "end_of_word_suffix", "byte_fallback", "ignore_merges"}) {
    if (is_set(model, other)) refuse(path, "a model without ", other);
  }
  adds_space_ = adds_space(file, path);
  const auto put = [&](std::int64_t token, std::string bytes) {
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    if (token < 0 || token >= kMost) refuse(path, "tokens below ", kMost, ", got ", token);
    if (token >= static_cast<std::int64_t>(symbols_.size()))
      symbols_.resize(static_cast<std::size_t>(token) + 1);
    symbols_[static_cast<std::size_t>(token)] = std::move(bytes);
  };
  for (const json& added : file.value("added_tokens", json::array())) {
    for (const char* other : {"lstrip", "rstrip", "single_word"})
      if (is_set(added, other)) refuse(path, "added tokens without ", other);
    const std::string content = added.at("content");
    const std::int64_t token = token_of(added.at("id"), path);
    if (content.empty()) refuse(path, "added tokens of some letters");
    put(token, content);
    special_.push_back({content, static_cast<std::int32_t>(token)});
  }
  const auto is_special = [&](std::int64_t token) {
    return std::any_of(special_.begin(), special_.end(),
                       [&](const Special& one) { return one.token == token; });
  };
  std::unordered_map<std::string, std::int64_t> of_letters;
  for (const auto& one : model.at("vocab").items()) {
    const std::int64_t token = of_letters[one.key()] = token_of(one.value(), path);
    if (!is_special(token)) put(token, bytes_of(one.key(), path));
  }
  const auto known = [&](const std::string& letters) {
    const auto found = of_letters.find(letters);
    if (found == of_letters.end()) refuse(path, "the token '", letters, "' in the vocabulary");
    return static_cast<std::int32_t>(found->second);
  };
  std::int32_t rank = 0;
  for (const json& merge : model.at("merges")) {
    const auto [left, right] = halves_of(merge);
    const std::pair pair(known(left), known(right));
    merges_.try_emplace(pair, Merge{rank++, known(left + right)});
  }
  of_byte_.assign(256, -1);
  for (std::size_t token = 0; token < symbols_.size(); ++token) {
    if (symbols_[token].size() == 1)
      of_byte_[static_cast<unsigned char>(symbols_[token][0])] = static_cast<std::int32_t>(token);
  }
  const auto missing = std::find(of_byte_.begin(), of_byte_.end(), -1);
  if (missing != of_byte_.end())
    refuse(path, "a token for each byte, got none for ", missing - of_byte_.begin());
}

std::vector<std::int32_t> BytePairs::encode(std::string_view text) const {
  std::vector<std::int32_t> tokens;
  std::vector<std::size_t> places(special_.size(), 0);  // of each one's next, from `at` on
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = text.size();
    const Special* next = nullptr;
    for (std::size_t i = 0; i < special_.size(); ++i) {
      if (places[i] <= at) places[i] = std::min(text.find(special_[i].text, at), text.size());
      const bool longer =
          next != nullptr && places[i] == end && special_[i].text.size() > next->text.size();
      if (places[i] < end || longer) end = places[i], next = &special_[i];
    }
    encode_plain(text.substr(at, end - at), tokens);
    at = end;
    if (next == nullptr) break;
    tokens.push_back(next->token);
    at += next->text.size();
  }
  return tokens;
}

void BytePairs::encode_plain(std::string_view text, std::vector<std::int32_t>& tokens) const {
  std::string spaced;
  if (adds_space_ && !text.empty() && text.front() != ' ') text = spaced = ' ' + std::string(text);
  const std::unique_ptr<pcre2_match_data, FreePattern> match(
      pcre2_match_data_create_from_pattern(words_pattern(), nullptr));
  std::unordered_map<std::string_view, std::vector<std::int32_t>> seen;
  std::uint32_t checked = 0;  // UTF-8, by the first match
  for (std::size_t at = 0; at < text.size();) {
    const int found = pcre2_match(words_pattern(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), at, PCRE2_ANCHORED | checked, match.get(), nullptr);
    if (found < 0)
      fail<DataError>(kTokenizer, "expected UTF-8 text, got other bytes at offset ",
                      pcre2_get_startchar(match.get()), " of ", text.size(), " (PCRE2's error ",
                      found, ")");
    checked = PCRE2_NO_UTF_CHECK;
    const std::size_t end = pcre2_get_ovector_pointer(match.get())[1];
    const std::string_view word = text.substr(at, end - at);
    auto [known, is_new] = seen.try_emplace(word);
    if (is_new) known->second = merged(word);
    tokens.insert(tokens.end(), known->second.begin(), known->second.end());
    at = end;
  }
}

/// The pair that was learnt first is merged first, of equal ones the leftmost.
std::vector<std::int32_t> BytePairs::merged(std::string_view word) const {
  struct Piece {
    std::int32_t token = 0;
    std::ptrdiff_t before = 0, after = 0;  // places; token -1: merged into the one before
  };
  std::vector<Piece> pieces;
  const auto size = static_cast<std::ptrdiff_t>(word.size());
  for (std::ptrdiff_t i = 0; i < size; ++i)
    pieces.push_back(
        {of_byte_[static_cast<unsigned char>(word[static_cast<std::size_t>(i)])], i - 1, i + 1});
  const auto piece = [&](std::ptrdiff_t i) -> Piece& {
    return pieces[static_cast<std::size_t>(i)];
  };
  using Candidate = std::tuple<std::int32_t, std::ptrdiff_t, std::int32_t, std::int32_t>;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto offer = [&](std::ptrdiff_t left) {
    if (left < 0 || piece(left).after >= size) return;
    const std::int32_t a = piece(left).token, b = piece(piece(left).after).token;
    const auto found = merges_.find({a, b});
    if (found != merges_.end()) candidates.emplace(found->second.rank, left, a, b);
  };
  for (std::ptrdiff_t i = 0; i + 1 < size; ++i) offer(i);
  while (!candidates.empty()) {
    const auto [rank, left, a, b] = candidates.top();
    candidates.pop();
    const std::ptrdiff_t right = piece(left).after;
    const bool stands = piece(left).token == a && right < size && piece(right).token == b;
    if (!stands) continue;
    piece(left).token = merges_.at({a, b}).token;
    piece(left).after = piece(right).after;
    piece(right).token = -1;
    if (piece(left).after < size) piece(piece(left).after).before = left;
    offer(piece(left).before);
    offer(left);
  }
  std::vector<std::int32_t> tokens;
  for (std::ptrdiff_t i = 0; i < size; i = piece(i).after) tokens.push_back(piece(i).token);
  return tokens;
}

}  // namespace cairn::data::detail
