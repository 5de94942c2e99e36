// All of cairn::libtorch, and what a training loop takes beside it.
#pragma once

#include "cairn/checkpointing/training_state.h"
#include "cairn/libtorch/amp.h"
#include "cairn/libtorch/autocast.h"
#include "cairn/libtorch/checkpoint.h"
#include "cairn/libtorch/generator.h"
#include "cairn/libtorch/model.h"
#include "cairn/libtorch/optimizer.h"
#include "cairn/libtorch/sync_batch_norm.h"
#include "cairn/libtorch/tensors.h"
#include "cairn/optim/optim.h"
