// Everything of cairn::autograd.
#pragma once

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/engine.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/observer.h"
#include "cairn/autograd/ops.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"
