// Losses: nn::cross_entropy(logits, target), ... See cairn/autograd/ops.h for shapes and options.
#pragma once

#include "cairn/autograd/ops.h"

namespace cairn::nn {

using autograd::bce_with_logits;
using autograd::binary_cross_entropy;
using autograd::cosine_embedding_loss;
using autograd::cosine_similarity;
using autograd::cross_entropy;
using autograd::CrossEntropyOptions;
using autograd::ctc_loss;
using autograd::CtcOptions;
using autograd::huber_loss;
using autograd::kl_div;
using autograd::l1_loss;
using autograd::linear_cross_entropy;
using autograd::mse_loss;
using autograd::nll_loss;
using autograd::NllOptions;
using autograd::Reduction;
using autograd::smooth_l1_loss;
using autograd::triplet_margin_loss;
using autograd::TripletOptions;

}  // namespace cairn::nn
