// Byte-level byte-pair encoding, as GPT-2 and its followers have it: text is cut into words, a word
// into its bytes, and pairs of neighbours are merged in the order in which they were learnt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cairn::data::detail {

class BytePairs {
 public:
  /// Hugging Face's tokenizer.json. Throws IoError, and DataError for what is no such file or what
  /// it asks for beyond GPT-2's way (a normalizer, words cut otherwise).
  static BytePairs from_file(const std::string& path);

  /// Throws DataError where the text is not UTF-8.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// The bytes of each token; empty: a number that no token has.
  const std::vector<std::string>& symbols() const { return symbols_; }

 private:
  void read_vocabulary(const std::string& json, const std::string& path);
  void encode_plain(std::string_view text, std::vector<std::int32_t>& tokens) const;
  std::vector<std::int32_t> merged(std::string_view word) const;

  struct Merge {
    std::int32_t rank = 0, token = 0;
  };
  struct PairHash {
    std::size_t operator()(const std::pair<std::int32_t, std::int32_t>& pair) const {
      const auto both =
          static_cast<std::uint64_t>(pair.first) << 32 | static_cast<std::uint32_t>(pair.second);
      return static_cast<std::size_t>(both * 0x9e3779b97f4a7c15u >> 16);
    }
  };
  std::vector<std::string> symbols_;
  std::vector<std::int32_t> of_byte_;
  std::unordered_map<std::pair<std::int32_t, std::int32_t>, Merge, PairHash> merges_;
  struct Special {
    std::string text;
    std::int32_t token = 0;
  };
  std::vector<Special> special_;  // found in texts as they are
  bool adds_space_ = false;       // ahead of a text
};

}  // namespace cairn::data::detail
