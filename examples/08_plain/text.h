// What the GPT reads: the numbers from 0 on, one after another, as digits and commas. A step's
// batch depends on the step alone, so that a run that is resumed reads on where it stopped.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace plain {

struct Batch {
  std::vector<int> inputs, targets;  // [rows, tokens]; a target is the token after
};

class Text {
 public:
  static constexpr std::size_t kVocabulary = 11;

  explicit Text(std::size_t tokens) : tokens_(tokens) {
    for (int i = 0; i < 10000; ++i) text_ += std::to_string(i) + ",";
  }

  /// Rows begin ... begin + rows - 1 of the step's batch.
  Batch batch(std::int64_t step, std::size_t begin, std::size_t rows) const {
    Batch batch;
    for (std::size_t row = begin; row < begin + rows; ++row) {
      std::mt19937 random(static_cast<unsigned>(step * 1000) + static_cast<unsigned>(row));
      const std::size_t first = random() % (text_.size() - tokens_ - 1);
      for (std::size_t t = 0; t < tokens_; ++t) {
        batch.inputs.push_back(token(first + t));
        batch.targets.push_back(token(first + t + 1));
      }
    }
    return batch;
  }

 private:
  int token(std::size_t i) const { return text_[i] == ',' ? 10 : text_[i] - '0'; }

  std::size_t tokens_;
  std::string text_;
};

}  // namespace plain
