#include "cairn/data/text.h"

#include <algorithm>

#include "file_bytes.h"

namespace cairn::data {

namespace {

constexpr const char* kTextDataset = "text_dataset";

Vocabulary vocabulary_of(std::string_view text, const TextOptions& options) {
  const bool pairs = options.unit == TextUnit::byte_pairs;
  CAIRN_CHECK(pairs != options.tokenizer.empty(), kTextDataset,
              "expected a tokenizer with TextUnit::byte_pairs, got '", options.tokenizer,
              "' with unit ", static_cast<int>(options.unit));
  if (pairs) return Vocabulary::of_tokenizer(options.tokenizer);
  return options.unit == TextUnit::bytes ? Vocabulary::of_bytes() : Vocabulary::of_characters(text);
}

}  // namespace

TextDataset::TextDataset(std::string_view text, const TextOptions& options)
    : window_(options.window), stride_(options.stride == 0 ? options.window : options.stride) {
  CAIRN_CHECK(window_ >= 1, kTextDataset, "expected a window of at least 1 token, got ", window_);
  CAIRN_CHECK(stride_ >= 1, kTextDataset, "expected a stride >= 0, got ", options.stride);
  auto vocabulary = std::make_shared<Vocabulary>(vocabulary_of(text, options));
  tokens_ = std::make_shared<std::vector<std::int32_t>>(vocabulary->encode(text));
  vocabulary_ = std::move(vocabulary);
  *this = part(0, static_cast<std::int64_t>(tokens_->size()));
}

TextDataset TextDataset::from_files(const std::vector<std::string>& paths,
                                    const TextOptions& options) {
  CAIRN_CHECK(!paths.empty(), kTextDataset, "expected at least one file, got none");
  std::string text;
  for (const std::string& path : paths) text += detail::read_maybe_gzip(path, kTextDataset);
  return TextDataset(text, options);
}

TextDataset TextDataset::part(std::int64_t begin, std::int64_t end) const {
  if (end - begin <= window_) {
    core::fail<core::DataError>(kTextDataset, "expected at least ", window_ + 1,
                                " tokens (a window of ", window_, " and the next one), got ",
                                end - begin, " (shorten the window)");
  }
  TextDataset result = *this;
  result.begin_ = begin;
  result.end_ = end;
  return result;
}

std::int64_t TextDataset::size() const {
  return (end_ - begin_ - window_ - 1) / stride_ + 1;
}

SampleSpec TextDataset::spec() const {
  return {{window_}, DType::i64, {window_}, DType::i64};
}

void TextDataset::read(std::int64_t index, const TensorView& input, const TensorView& label) const {
  CAIRN_CHECK(index >= 0 && index < size(), kTextDataset, "expected a sample below ", size(),
              ", got ", index);
  const std::int32_t* from = tokens_->data() + begin_ + index * stride_;
  std::copy(from, from + window_, input.as<std::int64_t>());
  std::copy(from + 1, from + 1 + window_, label.as<std::int64_t>());
}

std::span<const std::int32_t> TextDataset::tokens() const {
  return {tokens_->data() + begin_, static_cast<std::size_t>(end_ - begin_)};
}

std::pair<TextDataset, TextDataset> TextDataset::split(double fraction) const {
  CAIRN_CHECK(fraction > 0.0 && fraction < 1.0, kTextDataset,
              "expected a fraction between 0 and 1, got ", fraction);
  const std::int64_t middle =
      begin_ + static_cast<std::int64_t>(fraction * static_cast<double>(end_ - begin_));
  return {part(begin_, middle), part(middle, end_)};
}

}  // namespace cairn::data
