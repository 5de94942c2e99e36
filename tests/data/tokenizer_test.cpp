// Byte pairs against Hugging Face's tokenizers (golden/make_tokenizer.py).
#include <fstream>
#include <nlohmann/json.hpp>

#include "cairn/data/text.h"
#include "support.h"
#include "support/message_of.h"
#include "support/test_folder.h"

namespace cairn::data::testing {
namespace {

using core::DataError;
using nlohmann::json;
using ::testing::HasSubstr;

const std::string kGolden = test::test_folder() + std::string("/data/golden");
const std::string kFile = kGolden + "/tokenizer.json";

std::vector<std::int64_t> wide(const std::vector<std::int32_t>& tokens) {
  return {tokens.begin(), tokens.end()};
}

TEST(Tokenizer, HasHuggingFacesTokens) {
  const Vocabulary vocabulary = Vocabulary::of_tokenizer(kFile);
  EXPECT_EQ(vocabulary.size(), 702);
  const json told = json::parse(std::ifstream(kGolden + "/tokens.json"));
  ASSERT_GT(told.size(), 200u);
  for (const auto& [text, tokens] : told.get<std::vector<std::pair<std::string, json>>>()) {
    const std::vector<std::int32_t> own = vocabulary.encode(text);
    EXPECT_EQ(json(own), tokens) << text;
    EXPECT_EQ(vocabulary.decode(wide(own)), text);
  }
}

TEST(Tokenizer, OfLongTextsTakesNoLongerForAWordThanItsLength) {
  const Vocabulary vocabulary = Vocabulary::of_tokenizer(kFile);
  std::string text(2'000'000, 'e');
  text += std::string(1'000'000, ' ') + "<|end|>";
  for (int i = 0; i < 20'000; ++i) text += "<|end|> the ";
  const auto tokens = vocabulary.encode(text);
  EXPECT_EQ(vocabulary.decode(wide(tokens)), text);
}

TEST(Tokenizer, OfTextThatIsNotUtf8NamesThePlace) {
  const Vocabulary vocabulary = Vocabulary::of_tokenizer(kFile);
  for (const char* bad : {"ab\xFFz", "ab\xC3", "ab\xC0\x80", "ab\xED\xA0\x80"})
    expect_error<DataError>([&] { (void)vocabulary.encode(bad); }, {"UTF-8", "offset 2"});
}

TEST(Tokenizer, OfAnotherKindIsNamed) {
  const TempFolder folder;
  const std::string path = folder.path() + "/tokenizer.json";
  const json good = json::parse(std::ifstream(kFile));
  const auto refused = [&](const json& changes) {
    json file = good;
    file.merge_patch(changes);
    std::ofstream(path) << file.dump();
    return test::message_of<DataError>([&] { (void)Vocabulary::of_tokenizer(path); });
  };
  EXPECT_THAT(refused({{"model", {{"type", "WordPiece"}}}}), HasSubstr("of type BPE, got"));
  EXPECT_THAT(refused({{"model", {{"byte_fallback", true}}}}), HasSubstr("without byte_fallback"));
  EXPECT_THAT(refused({{"model", {{"dropout", 0.1}}}}), HasSubstr("without dropout"));
  EXPECT_THAT(refused({{"normalizer", {{"type", "NFC"}}}}), HasSubstr("NFC"));
  EXPECT_THAT(refused({{"pre_tokenizer", {{"type", "Metaspace"}}}}), HasSubstr("Metaspace"));
  EXPECT_THAT(refused({{"pre_tokenizer", {{"use_regex", false}}}}), HasSubstr("with use_regex"));
  EXPECT_THAT(refused({{"model", {{"vocab", {{"\xc4\x80", nullptr}}}}}}),
              HasSubstr("got none for 0"));
  EXPECT_THAT(refused({{"model", {{"vocab", {{"\xe4\xb8\xad", 5}}}}}}), HasSubstr("byte-level"));
  EXPECT_THAT(refused({{"model", {{"vocab", {{"zz", -5}}}}}}), HasSubstr("got -5"));
  EXPECT_THAT(refused({{"model", {{"vocab", {{"zz", 1e300}}}}}}), HasSubstr("got 1e+300"));
  EXPECT_THAT(refused({{"model", {{"merges", {"a zzz"}}}}}), HasSubstr("the token 'zzz'"));
  EXPECT_THAT(refused({{"added_tokens", {{{"id", 9}, {"content", "x"}, {"lstrip", true}}}}}),
              HasSubstr("without lstrip"));
  EXPECT_THAT(refused({{"model", 3}}), HasSubstr("expected a tokenizer.json, got"));
  std::ofstream(path) << "{\"model\":";
  expect_error<DataError>([&] { (void)Vocabulary::of_tokenizer(path); }, {"tokenizer.json"});
  expect_error<core::IoError>([&] { (void)Vocabulary::of_tokenizer(path + "x"); }, {"x'"});
}

TEST(Tokenizer, CutsDatasets) {
  const std::string text = "The quick brown fox jumps over the lazy dog. <|endoftext|>";
  const TextDataset cut(text, {.window = 3, .unit = TextUnit::byte_pairs, .tokenizer = kFile});
  EXPECT_EQ(cut.vocabulary().unit(), TextUnit::byte_pairs);
  const Tensor input = Tensor::empty({3}, DType::i64), label = Tensor::empty({3}, DType::i64);
  cut.read(0, input, label);
  const auto tokens = wide(cut.vocabulary().encode(text));
  EXPECT_EQ(input.to_vector<std::int64_t>(),
            std::vector<std::int64_t>(tokens.begin(), tokens.begin() + 3));
  expect_error<core::InvalidArgument>(
      [&] { TextDataset(text, {.window = 3, .unit = TextUnit::byte_pairs}); }, {"a tokenizer"});
  expect_error<core::InvalidArgument>([&] { TextDataset(text, {.window = 3, .tokenizer = kFile}); },
                                      {"byte_pairs"});
}

}  // namespace
}  // namespace cairn::data::testing
