#include "cairn/data/text.h"

#include "support.h"

namespace cairn::data::testing {
namespace {

using core::DataError;
using Tokens = std::vector<std::int64_t>;

std::pair<Tokens, Tokens> sample(const TextDataset& text, std::int64_t index) {
  const Tensor input = Tensor::empty(text.spec().input_shape, DType::i64);
  const Tensor label = Tensor::empty(text.spec().label_shape, DType::i64);
  text.read(index, input, label);
  return {input.to_vector<std::int64_t>(), label.to_vector<std::int64_t>()};
}

TEST(Vocabulary, OfBytesCoversEveryByte) {
  const Vocabulary bytes = Vocabulary::of_bytes();
  EXPECT_EQ(bytes.size(), 256);
  const std::string text{'\0', 'a', '\xFF'};
  EXPECT_EQ(bytes.encode(text), (std::vector<std::int32_t>{0, 97, 255}));
  EXPECT_EQ(bytes.decode({0, 97, 255}), text);
  expect_error<core::InvalidArgument>([&] { bytes.decode({256}); }, {"below 256", "got 256"});
}

TEST(Vocabulary, OfCharactersFollowsCodePoints) {
  const Vocabulary letters = Vocabulary::of_characters("bäa€a😀\n");
  EXPECT_EQ(letters.size(), 6);  // \n a b ä € 😀
  EXPECT_EQ(letters.encode("😀a€ä"), (std::vector<std::int32_t>{5, 1, 4, 3}));
  EXPECT_EQ(letters.decode({3, 0, 5}), "ä\n😀");
  expect_error<DataError>([&] { letters.encode("az"); }, {"6 characters", "'z' at byte 1"});
}

TEST(Vocabulary, NamesTextThatIsNotUtf8) {
  for (const char* bad : {"ab\xFFz", "ab\xC3", "ab\xC0\x80", "ab\xE0\x80\x80", "ab\xED\xA0\x80",
                          "ab\xF4\x90\x80\x80"}) {
    expect_error<DataError>([&] { Vocabulary::of_characters(bad); }, {"UTF-8", "offset 2"});
  }
  const std::string_view cut =
      std::string_view("ab\xE2\x82\xAC").substr(0, 4);  // what follows fits
  expect_error<DataError>([&] { Vocabulary::of_characters(cut); }, {"UTF-8", "offset 2"});
}

TEST(TextDataset, CutsWindowsThatShareTheirBorder) {
  const TextDataset text("0123456789", {.window = 3});
  EXPECT_EQ(text.size(), 3);  // windows 0-3, 3-6, 6-9
  EXPECT_EQ(sample(text, 0), (std::pair<Tokens, Tokens>{{48, 49, 50}, {49, 50, 51}}));
  EXPECT_EQ(sample(text, 2), (std::pair<Tokens, Tokens>{{54, 55, 56}, {55, 56, 57}}));
  EXPECT_THROW(sample(text, 3), core::InvalidArgument);
}

TEST(TextDataset, FollowsTheStride) {
  const TextDataset text("abcde", {.window = 2, .stride = 1, .unit = TextUnit::characters});
  EXPECT_EQ(text.size(), 3);
  EXPECT_EQ(sample(text, 2), (std::pair<Tokens, Tokens>{{2, 3}, {3, 4}}));
}

TEST(TextDataset, SplitsWithOneVocabulary) {
  const TextDataset text("aaaaaaaabc", {.window = 1, .unit = TextUnit::characters});
  const auto [train, test] = text.split(0.8);
  EXPECT_EQ(train.size(), 7);
  EXPECT_EQ(test.size(), 1);
  EXPECT_EQ(train.vocabulary().size(), 3);
  EXPECT_EQ(sample(test, 0), (std::pair<Tokens, Tokens>{{1}, {2}}));
  EXPECT_EQ(test.tokens().size(), 2u);
  const auto [third, fourth] = text.split(0.5).second.split(0.6);  // of "aaabc"
  EXPECT_EQ(third.tokens().size(), 3u);
  EXPECT_EQ(sample(fourth, 0), (std::pair<Tokens, Tokens>{{1}, {2}}));
  expect_error<DataError>([&] { text.split(0.95); }, {"at least 2 tokens", "got 1"});
  EXPECT_THROW(text.split(1.0), core::InvalidArgument);
}

TEST(TextDataset, JoinsFiles) {
  const TempFolder folder;
  const TextDataset text =
      TextDataset::from_files({folder.write("a", "ab"), folder.write("b", "cd")}, {.window = 3});
  EXPECT_EQ(sample(text, 0).second, (Tokens{'b', 'c', 'd'}));
  expect_error<core::IoError>([&] { TextDataset::from_files({folder.path() + "/absent"}, {}); },
                              {"absent"});
  EXPECT_THROW(TextDataset::from_files({}, {}), core::InvalidArgument);
}

TEST(TextDataset, RefusesWhatCannotBe) {
  expect_error<DataError>([] { TextDataset("abc", {.window = 3}); },
                          {"at least 4 tokens", "got 3"});
  EXPECT_THROW(TextDataset("abc", {.window = 0}), core::InvalidArgument);
  EXPECT_THROW(TextDataset("abc", {.window = 1, .stride = -1}), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::data::testing
