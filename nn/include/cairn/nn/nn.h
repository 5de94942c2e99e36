// Everything of cairn::nn.
#pragma once

#include "cairn/nn/activations.h"
#include "cairn/nn/attention.h"
#include "cairn/nn/conv.h"
#include "cairn/nn/deferred_init.h"
#include "cairn/nn/embedding.h"
#include "cairn/nn/init.h"
#include "cairn/nn/layer.h"
#include "cairn/nn/linear.h"
#include "cairn/nn/losses.h"
#include "cairn/nn/metrics.h"
#include "cairn/nn/module.h"
#include "cairn/nn/norm.h"
#include "cairn/nn/pool.h"
#include "cairn/nn/rnn.h"
#include "cairn/nn/sequential.h"
#include "cairn/nn/transformer.h"
