// What counting alone predicts: the marks a language model has to beat. In nats per token, with
// add-one smoothing, counted on the training text and measured on the test text.
#pragma once

#include "cairn/data/text.h"

namespace char_lm {

double unigram_loss(const cairn::data::TextDataset& train, const cairn::data::TextDataset& test);
double bigram_loss(const cairn::data::TextDataset& train, const cairn::data::TextDataset& test);

}  // namespace char_lm
