// The formulas of all update rules: math::formula_of<V>(options) is the one of a rule's options.
#if defined(CAIRN_KERNELS_MATH_UPDATE_RULES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_UPDATE_RULES_H_
#undef CAIRN_KERNELS_MATH_UPDATE_RULES_H_
#else
#define CAIRN_KERNELS_MATH_UPDATE_RULES_H_
#endif

#include "math/adagrad.h"
#include "math/adam.h"
#include "math/lamb.h"
#include "math/novograd.h"
#include "math/rmsprop.h"
#include "math/sgd.h"

#endif
