// Text for language models: files as one sequence of tokens, cut into windows.
//
// Tokens are bytes (256 of them), the distinct characters (UTF-8 code points) of the text, numbered
// in code point order, or those of a tokenizer.json of Hugging Face's with byte-level byte pairs
// (GPT-2's). Sample i is the window of T+1 tokens from i * stride on: input [T]
// i64 are its first T tokens, label [T] i64 its last T, so label t follows input t.
//
//   data::TextDataset text = data::TextDataset::from_files({"shakespeare.txt"}, {.window = 128});
//   auto [train, test] = text.split(0.9);
//   std::string sample = text.vocabulary().decode(tokens);
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/data/dataset.h"

namespace cairn::data {

namespace detail {
class BytePairs;
}

enum class TextUnit { bytes, characters, byte_pairs };

class Vocabulary {
 public:
  static Vocabulary of_bytes();
  /// Numbers the distinct characters of the text. Throws DataError, which names the byte, where the
  /// text is not UTF-8.
  static Vocabulary of_characters(std::string_view text);
  /// That of a tokenizer.json: a BPE whose words are cut as GPT-2's are (pre_tokenizer ByteLevel).
  /// encode() finds its added tokens ("<|endoftext|>") in texts. Throws IoError, and DataError that
  /// names what it has otherwise.
  static Vocabulary of_tokenizer(const std::string& path);

  std::int64_t size() const { return static_cast<std::int64_t>(symbols_.size()); }
  TextUnit unit() const { return unit_; }
  /// The tokens of this text. Throws DataError for a character that the vocabulary lacks and, but
  /// for bytes, for text that is not UTF-8.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// The text of these tokens. Throws InvalidArgument for a token out of range.
  std::string decode(const std::vector<std::int64_t>& tokens) const;
  const std::string& symbol(std::int64_t token) const;

 private:
  TextUnit unit_ = TextUnit::bytes;
  std::vector<std::string> symbols_;   // text of each token
  std::vector<std::uint32_t> points_;  // ascending code point of each token; characters only
  std::shared_ptr<const detail::BytePairs> pairs_;
};

struct TextOptions {
  std::int64_t window = 128;  // T, tokens
  /// Tokens between the starts of two samples; 0 means T, so that windows share only a border
  /// token.
  std::int64_t stride = 0;
  TextUnit unit = TextUnit::bytes;
  /// For TextUnit::byte_pairs: Vocabulary::of_tokenizer's file.
  std::string tokenizer = {};
};

class TextDataset : public Dataset {
 public:
  /// Takes a text of at least window + 1 tokens. Throws DataError for a shorter one.
  TextDataset(std::string_view text, const TextOptions& options);
  /// Takes the texts of these files, one after the other. Throws IoError where one cannot be read.
  static TextDataset from_files(const std::vector<std::string>& paths, const TextOptions& options);

  std::int64_t size() const override;
  SampleSpec spec() const override;
  void read(std::int64_t index, const TensorView& input, const TensorView& label) const override;

  const Vocabulary& vocabulary() const { return *vocabulary_; }
  /// Every token of this part of the text, in order.
  std::span<const std::int32_t> tokens() const;
  /// The first `fraction` of the tokens, and the rest, as two data sets with the same vocabulary.
  /// Each part must hold a window.
  std::pair<TextDataset, TextDataset> split(double fraction) const;

 private:
  TextDataset part(std::int64_t begin, std::int64_t end) const;

  std::shared_ptr<const Vocabulary> vocabulary_;
  std::shared_ptr<const std::vector<std::int32_t>> tokens_;
  std::int64_t begin_ = 0, end_ = 0;  // this part of the tokens
  std::int64_t window_ = 0, stride_ = 0;
};

}  // namespace cairn::data
