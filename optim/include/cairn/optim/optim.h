// Everything of cairn::optim.
#pragma once

#include "cairn/optim/accumulation.h"
#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/arena.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/larc.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/optimizer.h"
#include "cairn/optim/report.h"
#include "cairn/optim/rmsprop.h"
#include "cairn/optim/schedule.h"
#include "cairn/optim/sgd.h"
#include "cairn/optim/weight_average.h"
